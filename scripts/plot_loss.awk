# plot_loss.awk: plots the losses of a run's log.jsonl as text.
#   *  training loss, mean over the steps of a column      o  validation loss
#   ^  a loss above the plot, whose range excludes the first, steep steps
#
# Usage: awk -f scripts/plot_loss.awk [-v width=60] [-v height=15] RUN/log.jsonl

function number_of(key,    at) { # value of a key of the object in this line; "" if there is none
    at = index($0, "\"" key "\":")
    if (!at) return ""
    at = substr($0, at + length(key) + 3)
    sub(/^ */, "", at)
    sub(/[,}].*/, "", at)
    if (at !~ /^[-+0-9.eE]+$/) return ""
    sub(/[.]/, point, at)
    return at + 0
}
function draw(loss, column, sign) {
    if (loss > high) {
        sign = "^"
        loss = high
        above = 1
    }
    mark[int((loss - low) / (high - low) * (height - 1) + 0.5), column] = sign
}
function column_of(step) { return steps > 1 ? int((step - first) / (steps - first) * (width - 1) + 0.5) : 0 }
function take(loss) {
    if (!seen++) low = high = loss
    if (loss < low) low = loss
    if (loss > high) high = loss
}

BEGIN {
    if (!width) width = 60
    if (!height) height = 15
    point = substr(sprintf("%.1f", 0), 2, 1) # of the locale, in which mawk reads numbers
}
/"kind": *"(train|val)"/ {
    loss = number_of("loss")
    step = number_of("step")
    if (loss == "" || step == "") next # a non-finite loss is null
    if (!records++) first = step
    if (step < first) first = step
    if (step > steps) steps = step
    if ($0 ~ /"kind": *"train"/) {
        train_step[++train_count] = step
        train_loss[train_count] = loss
    } else {
        val_step[++val_count] = step
        val_loss[val_count] = loss
    }
}
END {
    if (!records) {
        print "plot_loss.awk: no losses in " (ARGC > 1 ? ARGV[1] : "the input") > "/dev/stderr"
        exit 1
    }
    for (i = 1; i <= train_count; i++) {
        c = column_of(train_step[i])
        sum[c] += train_loss[i]
        count[c]++
    }
    steep = records < 100 ? 0 : int(width / 20) # columns
    for (c in count) if (c >= steep) take(sum[c] / count[c])
    for (i = 1; i <= val_count; i++) if (column_of(val_step[i]) >= steep) take(val_loss[i])
    if (high - low < 1e-6) high = low + 1e-6
    for (c in count) draw(sum[c] / count[c], c + 0, "*")
    for (i = 1; i <= val_count; i++) draw(val_loss[i], column_of(val_step[i]), "o")

    print "  loss (nats per token)    * training   o validation" (above ? "   ^ higher" : "")
    for (r = height - 1; r >= 0; r--) {
        label = r % 2 ? "" : sprintf("%.2f", low + (high - low) * r / (height - 1))
        line = ""
        for (c = 0; c < width; c++) line = line ((r, c) in mark ? mark[r, c] : " ")
        sub(/ +$/, "", line)
        printf "%8s |%s\n", label, line
    }
    axis = ""
    for (c = 0; c < width; c++) axis = axis "-"
    printf "%8s +%s\n", "", axis
    half = int(width / 2)
    right = sprintf("%d", steps)
    printf "%8s  %-" half "d%-" (width - half - length(right)) "d%s steps\n", "", first, (first + steps) / 2, right
}
