// page_plot.js: draws views of figures as SVG, tells the point beside the pointer, and zooms by dragging.
const node = (tag, attributes, ...inside) => {
  const e = document.createElementNS('http://www.w3.org/2000/svg', tag);
  Object.entries(attributes).forEach(([name, value]) => e.setAttribute(name, value));
  e.append(...inside);
  return e;
};
const finite = x => typeof x === 'number' && isFinite(x);
const strokes = {solid: '', dash: '7 3', dot: '2 3', dashdot: '7 3 2 3'};
const MARKS = { // paths relative to a point; those below have strokes alone
  circle: r => `m${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  square: r => `m${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: r => `m0 ${-1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
  'triangle-up': r => `m0 ${-1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}z`,
  cross: r => `m${-r} 0h${2 * r}m${-r} ${-r}v${2 * r}`,
  x: r => `m${-r} ${-r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
  star: r => MARKS.cross(r) + `m0 ${-r}` + MARKS.x(.7 * r),
};
const FONT = 12, pen = document.createElement('canvas').getContext('2d'), zooms = {};
const family = () => getComputedStyle(document.body).fontFamily;
const widthOf = text => {
  pen.font = `${FONT}px ${family()}`;
  return pen.measureText(text).width;
};
const cut = (text, width) => {
  let length = text.length;
  while (length > 1 && widthOf(text.slice(0, length)) > width) length--;
  return length < text.length ? text.slice(0, length - 1) + '…' : text;
};

function roundTicks(low, high, least) { // multiples of 1, 2 or 5 times a power of 10, at least `least` apart
  const ten = 10 ** Math.floor(Math.log10(least)), step = ten * [1, 2, 5, 10].find(m => m * ten >= least * .999);
  const ticks = [], end = high / step + 1e-9;
  for (let i = Math.ceil(low / step - 1e-9); i <= end; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

// Round ticks of a logarithmic axis from `low` to `high` that is `length` pixels long, with labels of `size` pixels:
// powers of 2; or 1..9, 1 2 5 or 1 times powers of 10, whichever fits; or multiples of a round step.
function logTicks(low, high, base, length, size) {
  const unit = length / Math.log10(high / low), ticks = [];
  const within = x => x >= low * .999 && x <= high * 1.001;
  const powers = (b, multiples, every) => {
    for (let k = Math.floor(Math.log(low) / Math.log(b)); b ** k <= high; k++)
      if (k % every === 0) ticks.push(...multiples.map(m => +(m * b ** k).toPrecision(12)).filter(within));
  };
  if (base === 2) powers(2, [1], Math.ceil(size / (unit * Math.log10(2)))); // of counts or shares
  else {
    const sets = [[[1, 2, 3, 4, 5, 6, 7, 8, 9], Math.log10(10 / 9)], [[1, 2, 5], Math.log10(2)], [[1], 1]];
    const [multiples, apart] = sets.find(([, apart]) => apart * unit >= size) || sets[2];
    powers(10, multiples, Math.ceil(size / (apart * unit)));
  }
  if (ticks.length >= 3 || base === 2) return ticks;
  const round = roundTicks(low, high, Math.max((high - low) / 6, size * high * Math.LN10 / unit));
  return round.length > ticks.length ? round : ticks;
}

// An axis of numbers from pixel `from` to `to`. names: of a category or a cell at each place instead.
function axisOf({range, log, from, to, size, integers, only, names}) {
  if (names) {
    const step = (to - from) / names.length, at = name => from + (names.indexOf(name) + .5) * step;
    return {at, step, ticks: names, label: String};
  }
  const f = log ? Math.log10 : x => x, [a, b] = range.map(f), length = Math.abs(to - from);
  const at = x => from + (f(x) - a) / (b - a) * (to - from);
  const back = p => { const x = a + (p - from) / (to - from) * (b - a); return log ? 10 ** x : x; };
  const least = (range[1] - range[0]) * size / length;
  const ticks = only ? only.filter(t => t >= range[0] && t <= range[1]) : log ? logTicks(...range, log, length, size)
    : roundTicks(...range, integers ? Math.max(1, least) : least);
  const largest = Math.max(...ticks.map(Math.abs));
  const power = log || largest < 1e4 ? 0 : Math.floor(Math.log10(largest) / 3);
  const label = x => power ? +(x / 1000 ** power).toPrecision(6) + (x ? ' kMGTP'[power] : '') : shortNumber(x);
  return {at, back, ticks, label, range};
}

function extent(traces, axis, error, log, zero) { // the range of the values and bars, with a margin
  let low = Infinity, high = -Infinity;
  const add = x => { if (finite(x) && (!log || x > 0)) [low, high] = [Math.min(low, x), Math.max(high, x)]; };
  for (const t of traces) t[axis].forEach((x, i) => {
    add(x);
    if (t[error] && finite(x)) add(x - t[error][i]), add(x + t[error][i]);
    if (axis === 'y' && t.low) add(t.low[i]), add(t.high[i]);
  });
  if (zero) add(0);
  if (low > high) return [1, 2];
  const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
  const margin = .03 * (b - a) || (log ? .1 : Math.abs(a) * .1 || 1);
  return [a - margin, b + margin].map(x => log ? 10 ** x : x);
}

function pathOf(t, place) { // a line with gaps at points without a value
  let pen = 'M';
  return t.x.map((_, i) => {
    const p = place(t, i);
    if (!p) { pen = 'M'; return ''; }
    const part = pen + p.map(x => x.toFixed(1)).join(' ');
    pen = 'L';
    return part;
  }).join('');
}

function traceNodes(t, x, y, place) {
  const c = color(t.arm), mode = t.mode || 'lines', out = [], at = (a, b) => `${a.toFixed(1)} ${b.toFixed(1)}`;
  const each = f => t.x.map((_, i) => place(t, i) ? f(i, ...place(t, i)) : '').join('');
  if (t.low) {
    const edge = values => t.x.map((a, i) => finite(values[i]) ? at(x.at(a), y.at(values[i])) : null);
    const points = [...edge(t.low), ...edge(t.high).reverse()].filter(Boolean);
    out.push(node('path', {d: `M${points.join('L')}z`, fill: c, 'fill-opacity': .16, class: 'band'}));
  }
  const end = (axis, value) => finite(axis.at(value)) ? axis.at(value) : axis.at(axis.range[0]); // of a bar
  const bars = each((i, px, py) => {
    const [e, f] = [(t.error || [])[i], (t.xerror || [])[i]];
    return (e ? `M${px - 3} ${end(y, t.y[i] - e)}h6m-3 0V${end(y, t.y[i] + e)}m-3 0h6` : '')
      + (f ? `M${end(x, t.x[i] - f)} ${py - 3}v6m0 -3H${end(x, t.x[i] + f)}m0 -3v6` : '');
  });
  if (bars) out.push(node('path', {d: bars, stroke: c, 'stroke-width': 1.2, fill: 'none', class: 'bars'}));
  if (mode !== 'markers') out.push(node('path', {
    d: pathOf(t, place), stroke: c, fill: 'none', 'stroke-width': t.faint ? 1 : 2, class: 'line',
    opacity: t.faint ? .35 : 1, 'stroke-dasharray': strokes[t.dash ? 'dash' : dash(t.arm)],
  }));
  if (mode !== 'lines') {
    const name = t.symbol || symbol(t.arm), open = ['cross', 'x', 'star'].includes(name);
    const mark = MARKS[name](t.faint ? 3.2 : t.symbol ? 4.5 : 3.8);
    out.push(node('path', {
      d: each((_, px, py) => 'M' + at(px, py) + mark), class: 'marks',
      fill: open ? 'none' : c, stroke: open ? c : 'none', 'stroke-width': 1.8, opacity: t.faint ? .6 : 1,
    }));
  }
  return out;
}

function cellNodes(t, x, y) { // a map of shares, with a text in each cell
  return t.x.flatMap((a, i) => {
    const [px, py, w, h] = [x.at(a), y.at(t.y[i]), Math.abs(x.step) - 2, Math.abs(y.step) - 2], z = t.z[i] ?? 0;
    const at = {x: px - w / 2, y: py - h / 2, width: w, height: h};
    const text = {x: px, y: py + 4, 'text-anchor': 'middle', fill: css(z > .6 ? '--bg' : '--text')};
    return [node('rect', {...at, fill: css('--accent'), 'fill-opacity': z}), node('text', text, t.text[i])];
  });
}

function legendNodes(traces, width, top) { // on paper
  const named = [...new Map(traces.filter(t => !t.faint && !t.unnamed).map(t => [nameOf(t), t])).entries()];
  let [x, y] = [60, top];
  return named.map(([name, t]) => {
    if (x + widthOf(name) + 50 > width && x > 60) [x, y] = [60, y + 18];
    const line = {x1: x, x2: x + 26, y1: y, y2: y, stroke: color(t.arm), 'stroke-width': 2};
    const g = node('g', {}, node('line', {...line, 'stroke-dasharray': strokes[t.dash ? 'dash' : dash(t.arm)]}),
      node('text', {x: x + 32, y: y + 4, fill: css('--text')}, name));
    x += widthOf(name) + 50;
    return Object.assign(g, {bottom: y + 14});
  });
}

function hoverText(t, v, i) {
  const digits = (x, n) => finite(x) ? String(+x.toPrecision(n)) : x, e = t.error || t.xerror;
  const more = e && e[i] ? ` ± ${digits(e[i], 3)}` : '';
  const values = t.z ? [`${v.x}: ${t.x[i]}`, `${v.y}: ${t.y[i]}`, digits(t.z[i], 3)]
    : v.category ? [`${v.x}: ${digits(t.x[i], 5)}${more}`]
    : [`${v.x}: ${shortNumber(t.x[i])}`, `${v.y}: ${digits(t.y[i], 5)}${more}`];
  return [nameOf(t), t.who, t.z ? '' : (t.text || [])[i], ...values].filter(Boolean).join('\n');
}

const told = document.body.appendChild(Object.assign(document.createElement('div'), {id: 'told', hidden: true}));
function tell(div, picture, text, [px, py]) { // text: null: nothing
  told.hidden = text === null;
  picture.querySelectorAll('.pointed').forEach(e => e.remove());
  if (text === null) return;
  const box = div.getBoundingClientRect(), left = box.left + scrollX + px;
  told.textContent = text;
  told.style.top = `${box.top + scrollY + py + 12}px`;
  told.style.left = `${Math.max(4, px > box.width / 2 ? left - told.offsetWidth - 12 : left + 12)}px`;
  picture.append(node('circle', {cx: px, cy: py, r: 6, fill: 'none', stroke: css('--text'), class: 'pointed'}));
}

function draw(fig) {
  const div = of('plot-' + fig.id), v = viewOf(fig), key = [fig.id, v.label, state.lr].join();
  all(`#views-${fig.id} button`).forEach((b, n) => b.setAttribute('aria-pressed', fig.views[n] === v));
  const shown = v.traces.filter(t => visible(t, v)).map(t => ({...t, y: valuesOf(t)}));
  const values = axis => [...new Set(shown.flatMap(t => t[axis]))], zoom = paper ? {} : zooms[key] || {};
  const rows = v.category || v.heat ? values('y') : null, xs = v.heat ? values('x') : null;
  div.style.height = v.category ? 110 + 26 * rows.length + 'px' : '';
  const width = paper ? 660 : div.clientWidth, top = 12, bottom = 46;
  let height = v.category ? 110 + 26 * rows.length : paper ? 400 : div.clientHeight;
  const range = zoom.y || (v.focus && focus(shown)) || (rows ? null : extent(shown, 'y', 'error', v.ylog, v.zero));
  const end = height - bottom, [from, to] = rows ? [top, end] : [end, top];
  const y = axisOf({range, log: v.ylog, from, to, size: 30, names: rows});
  const label = tick => cut(y.label(tick), .4 * width);
  const left = Math.max(...y.ticks.map(tick => widthOf(label(tick))), 20) + (v.y ? 34 : 12), right = width - 14;
  const places = values('x');
  const x = axisOf({
    range: zoom.x || (xs ? null : extent(shown, 'x', 'xerror', v.xlog, v.zero_x)), log: v.xlog, from: left, to: right,
    size: v.xlog ? 46 : 70, integers: v.integers, names: xs, only: places.length === 1 && !v.category ? places : null,
  });
  const line = (x1, y1, x2, y2, stroke) => node('line', {x1, y1, x2, y2, stroke});
  const words = (x, y, anchor, text, more) =>
    node('text', {x, y, 'text-anchor': anchor, fill: css('--text'), ...more}, text);
  const across = (x, stroke) => line(x, top, x, end, stroke), along = (y, stroke) => line(left, y, right, y, stroke);
  const area = {x: left, y: top - 4, width: Math.max(0, right - left) + 4, height: end - top + 8}, grid = css('--line');
  const picture = node('svg', {width, height, 'font-size': FONT, 'font-family': family()},
    node('clipPath', {id: 'clip-' + fig.id}, node('rect', area)),
    ...v.heat ? [] : [...x.ticks.map(t => across(x.at(t), grid)), ...y.ticks.map(t => along(y.at(t), grid))],
    ...v.zero && y.at(0) > top && y.at(0) < end ? [along(y.at(0), css('--muted'))] : [],
    ...v.zero_x && x.at(0) > left ? [across(x.at(0), css('--muted'))] : [],
    node('g', {class: 'xticks'}, ...x.ticks.map(t => words(x.at(t), end + 17, 'middle', x.label(t)))),
    node('g', {class: 'yticks'}, ...y.ticks.map(t => words(left - 7, y.at(t) + 4, 'end', label(t)))),
    words((left + right) / 2, height - 8, 'middle', v.x),
    ...v.y && !v.category
      ? [words(0, 0, 'middle', v.y, {transform: `translate(13 ${(top + end) / 2}) rotate(-90)`})] : []);
  const place = (t, i) => {
    const a = t.x[i], b = t.y[i], p = (finite(a) || xs) && (finite(b) || rows) && [x.at(a), y.at(b)];
    return p && p.every(finite) ? p : null;
  };
  picture.append(node('g', {'clip-path': `url(#clip-${fig.id})`},
    ...shown.flatMap(t => t.z ? cellNodes(t, x, y) : traceNodes(t, x, y, place))));
  if (paper && !v.category && new Set(shown.filter(t => !t.faint && !t.unnamed).map(t => t.arm)).size > 1) {
    const legend = legendNodes(shown, width, height + 8);
    picture.append(...legend);
    picture.setAttribute('height', height = legend[legend.length - 1].bottom);
  }
  div.replaceChildren(picture);
  div.drawn = {traces: shown, x, y, height};
  if (!paper) follow(div, picture, fig, v, key, shown, place, {left, right, top, end, x, y});
}

function follow(div, picture, fig, v, key, shown, place, {left, right, top, end, x, y}) {
  const points = shown.flatMap(t => t.x.map((_, i) => [place(t, i), t, i])).filter(([p]) => p);
  const at = e => { const box = div.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
  let start = null, frame = null;
  div.onpointermove = e => {
    const [px, py] = at(e);
    if (start) {
      frame = frame || picture.appendChild(node('rect', {fill: css('--accent'), 'fill-opacity': .15}));
      const [a, b] = [Math.min(px, start[0]), Math.min(py, start[1])];
      Object.entries({x: a, y: b, width: Math.abs(px - start[0]), height: Math.abs(py - start[1])})
        .forEach(([name, value]) => frame.setAttribute(name, value));
      return;
    }
    let best = null, least = v.heat ? Infinity : 30 ** 2;
    for (const point of points) {
      const [a, b] = point[0], far = (a - px) ** 2 + (b - py) ** 2;
      if (far < least && a >= left - 1 && a <= right + 1 && b >= top - 5 && b <= end + 5) [best, least] = [point, far];
    }
    tell(div, picture, best && hoverText(best[1], v, best[2]), best ? best[0] : [0, 0]);
  };
  div.onpointerleave = () => { if (!start) tell(div, picture, null, []); };
  div.onpointerdown = e => {
    const [px, py] = at(e);
    if (e.pointerType !== 'mouse' || e.button || v.category || v.heat || px < left || py > end) return;
    start = [px, py];
    div.setPointerCapture(e.pointerId);
    e.preventDefault();
  };
  div.onpointerup = e => {
    if (!start) return;
    const [[a, b], [c, d]] = [start, at(e)], zoom = {...zooms[key]};
    const ends = (axis, ...p) => p.map(axis.back).sort((m, n) => m - n);
    start = null;
    if (Math.abs(a - c) > 8) zoom.x = ends(x, Math.max(left, Math.min(a, c)), Math.min(right, Math.max(a, c)));
    if (Math.abs(b - d) > 8) zoom.y = ends(y, Math.max(top, Math.min(b, d)), Math.min(end, Math.max(b, d)));
    zooms[key] = zoom;
    draw(current(fig.id));
  };
  div.ondblclick = () => { delete zooms[key]; draw(current(fig.id)); };
}
