"""The lab: runs plans of comparisons and writes their report. `python3 scripts/lab --help` lists the commands.

cli.py                the command line: commands, errors
run.py                the command `run`: a plan becomes runs
plan.py               parses plans
trainer.py            the trainer's options, and what a model costs
probe.py              the command `probe`: what attention has learned, and rounding errors, from a dump
coordinates.py        the coordinate check, of plans with `coordinates`
suggest.py            the command `suggest`: the best rate of a sweep, and options for a larger model
fit.py                the command `fit`: the loss over size and tokens, gaps at other sizes
scheduler.py          starts, watches and stops runs
synthetic.py          the files of needles, and their scores
run_directory.py      reads run.json, log.jsonl and checkpoints
schema.py             required types of the JSON files
option_history.py     options of a run that was resumed with others
report.py             the command `report`: runs become a page, PNG files and tables
study.py              reads the runs of a report and finds what prevents a comparison
tables.py             the tables of a report as JSON
report_tables.py      as they are shown, on the page and in Markdown
compare.py            values by seed: estimates, gaps to the reference
metrics.py            the table of the numbers of runs: where each is read, and what shows it
layers.py             tables of layers: statistics, evaluations, probes of checkpoints
evaluations.py        loss by position, recall, multiple-choice tasks, needles
measurements.py       the metrics of each run that claims are about
currencies.py         gaps at equal tokens, FLOPs and seconds
ngrams.py             losses of n-gram models on the data of runs
preconditions.py      what must hold of arms before a claim about attention has a verdict
archive.py            the command `archive`: runs in one file that is kept
claims, claims.py     published claims, the rules of their verdicts, and the verdicts
scoreboard.py         the command `scoreboard`: the verdicts as Markdown
long_context.py       what windows and YOCO cost each variant
attention_maps.py     reads attention maps
stats.py              intervals, tests, smoothing
figures.py            the curves of each figure
evaluation_figures.py those of evaluations
one_run.py            the tables and figures of one run
page.py, page.*       the HTML page
png.py                figures as PNG
"""
