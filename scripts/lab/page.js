// Draws the figures with plotly; handles theme, learning rate, smoothing, paper, and the updates of a live page.
// sessionStorage keeps the state when a page reloads itself. D is the data of the report. page.py puts page_files.js
// and page_maps.js before this file.
'use strict';
const root = document.documentElement, key = 'diffv2-lab:' + D.id;
const SHARES = [0, .005, .01, .02, .05, .1, .2, .4]; // of a line, that the running mean covers
const state = {
  theme: null, lr: D.main_rate, views: {}, maps: {}, hidden: [], scroll: 0, smoothing: 3, sorted: {},
  ...JSON.parse(sessionStorage.getItem(key) || '{}'),
};
const save = () => { state.scroll = window.scrollY; sessionStorage.setItem(key, JSON.stringify(state)); };
const media = window.matchMedia('(prefers-color-scheme: dark)');
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const of = id => document.getElementById(id);
const make = (tag, properties, ...inside) => {
  const e = Object.assign(document.createElement(tag), properties);
  e.append(...inside);
  return e;
};
let paper = false; // drawing for print or a file: in the light theme, every line with a dash
const theme = () => paper ? 'light' : state.theme || (media.matches ? 'dark' : 'light');
const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const place = arm => Object.keys(D.arms).indexOf(arm), colors = D.palette.light.length;
const color = arm => arm === null ? css('--muted') : D.palette[theme()][place(arm) % colors];
const cycle = arm => arm === null ? 0 : Math.floor(place(arm) / colors) % 4;
const dash = arm => arm === null ? 'dash' : D.dashes[paper ? (place(arm) + cycle(arm)) % 4 : cycle(arm)];
const symbol = arm => ['circle', 'square', 'diamond', 'cross'][paper ? place(arm) % 4 : cycle(arm)];
const pale = (hex, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(',')},${alpha})`;
const shortNumber = x => {
  const power = Math.abs(x) >= 1e5 ? Math.min(5, Math.floor(Math.log10(Math.abs(x)) / 3)) : 0;
  const digits = Number((x / 1000 ** power).toPrecision(6));
  return Math.abs(x) < 1e-4 && x ? x.toExponential() : digits + ' kMGTP'[power].trim();
};

function smooth(ys) { // a centred running mean over the chosen share of the line
  const half = Math.round(SHARES[state.smoothing] * ys.length) >> 1, sums = [0], counts = [0];
  if (!half) return ys;
  ys.forEach((y, i) => { sums.push(sums[i] + (y || 0)); counts.push(counts[i] + (y !== null)); });
  return ys.map((y, i) => {
    const a = Math.max(0, i - half), b = Math.min(ys.length, i + half + 1), n = counts[b] - counts[a];
    return n ? (sums[b] - sums[a]) / n : null;
  });
}

const visible = t => (t.lr === null || state.lr === 'all' || t.lr === state.lr) && !state.hidden.includes(t.arm);
const valuesOf = t => t.smooth ? smooth(t.y) : t.y;
const nameOf = t => t.name + (state.lr === 'all' && t.lr ? ', ' + t.lr : '');
const viewOf = fig => fig.views[Math.min(state.views[fig.id] || 0, fig.views.length - 1)];

function heatMap(t, v) { // of shares, with a text in each cell
  const hover = `${t.name.replaceAll('<', '&lt;')}<br>${v.x}: %{x}<br>${v.y}: %{y}<br>%{z:.3f}<extra></extra>`;
  const [xs, ys] = [t.x, t.y].map(values => [...new Set(values)]);
  const at = (x, y) => t.x.findIndex((_, i) => t.x[i] === x && t.y[i] === y);
  const grid = values => ys.map(y => xs.map(x => values[at(x, y)] ?? null));
  return [{
    type: 'heatmap', x: xs.map(String), y: ys.map(String), z: grid(t.z), text: grid(t.text), texttemplate: '%{text}',
    zmin: 0, zmax: 1, colorscale: [[0, css('--bg')], [1, css('--accent')]], showscale: false, xgap: 2, ygap: 2,
    hovertemplate: hover,
  }];
}

function plotlyTraces(t, v) {
  if (t.z) return heatMap(t, v);
  const c = color(t.arm), mode = t.mode || 'lines', out = [], y = valuesOf(t);
  if (t.low) {
    const band = {x: t.x, mode: 'lines', line: {width: 0}, hoverinfo: 'skip', showlegend: false};
    out.push({...band, y: t.low}, {...band, y: t.high, fill: 'tonexty', fillcolor: pale(c, .16)});
  }
  const bars = (e, axis) => e ? {[axis]: {type: 'data', array: e, thickness: 1.2, width: 4, color: c}} : {};
  const line = text => text ? text.replaceAll('<', '&lt;') + '<br>' : '';
  const error = t.error || t.xerror, more = error ? ' ± %{customdata:.3g}' : '';
  const axes = v.category ? `${line(v.x + ': %{x:.5g}' + more)}`
    : `${line(v.x + ': %{x:.6~s}')}${v.y.replaceAll('<', '&lt;')}: %{y:.5g}${more}`;
  out.push({
    x: t.x, y, mode, name: nameOf(t), text: t.text || undefined, customdata: error, connectgaps: false,
    opacity: t.faint && mode === 'lines' ? .35 : t.faint ? .6 : 1, showlegend: !t.faint && !t.unnamed,
    line: {color: c, width: t.faint ? 1 : 2, dash: t.dash ? 'dash' : dash(t.arm)},
    marker: {color: c, size: t.faint ? 7 : t.symbol ? 9 : 8, symbol: t.symbol || symbol(t.arm)},
    hovertemplate: line(nameOf(t)) + line(t.who) + (t.text ? '%{text}<br>' : '') + axes + '<extra></extra>',
    ...bars(t.error, 'error_y'), ...bars(t.xerror, 'error_x'),
  });
  return out;
}

// Round ticks of a logarithmic axis from `low` to `high` that is `length` pixels long, with labels of `size` pixels:
// powers of 2; or 1..9, 1 2 5 or 1 times powers of 10, whichever fits; or multiples of a round step.
function logTicks(low, high, base, length, size) {
  const unit = length / Math.log10(high / low), ticks = [];
  const within = x => x >= low * .999 && x <= high * 1.001;
  const powers = (b, multiples, every) => {
    for (let k = Math.floor(Math.log(b === 2 ? Math.max(1, low) : low) / Math.log(b)); b ** k <= high; k++)
      if (k % every === 0) ticks.push(...multiples.map(m => m * b ** k).filter(within));
  };
  if (base === 2) powers(2, [1], Math.ceil(size / (unit * Math.log10(2)))); // of counts, from 1
  else {
    const sets = [[[1, 2, 3, 4, 5, 6, 7, 8, 9], Math.log10(10 / 9)], [[1, 2, 5], Math.log10(2)], [[1], 1]];
    const [multiples, apart] = sets.find(([, apart]) => apart * unit >= size) || sets[2];
    powers(10, multiples, Math.ceil(size / (apart * unit)));
  }
  if (ticks.length >= 3 || base === 2) return ticks;
  const least = Math.max((high - low) / 6, size * high * Math.LN10 / unit), ten = 10 ** Math.floor(Math.log10(least));
  const step = ten * [1, 2, 5, 10].find(m => m * ten >= least);
  const round = [];
  for (let i = Math.ceil(low / step); i * step <= high * 1.001; i++) round.push(i * step);
  return round.length > ticks.length ? round : ticks;
}

// Sets the ticks of logarithmic axes for their present range, also after a zoom or a resize.
function setTicks(div, v) {
  const update = {};
  for (const [name, base, size] of [['xaxis', v.xlog, 46], ['yaxis', v.ylog, 22]]) {
    const axis = div._fullLayout[name];
    if (!base || axis.type !== 'log') continue;
    const ticks = logTicks(10 ** axis.range[0], 10 ** axis.range[1], base, axis._length, size);
    if (JSON.stringify(ticks) === JSON.stringify(axis.tickvals)) continue;
    Object.assign(update, {
      [name + '.tickmode']: 'array', [name + '.tickvals']: ticks, [name + '.ticktext']: ticks.map(shortNumber),
    });
  }
  return Object.keys(update).length ? Plotly.relayout(div, update) : null;
}

function focus(traces) { // the range of y without the first 5% of the axis, where lines are steep
  const at = traces.flatMap(t => t.x), first = Math.min(...at), start = first + .05 * (Math.max(...at) - first);
  const late = traces.flatMap(t => valuesOf(t).filter((y, i) => y !== null && t.x[i] >= start));
  if (!late.length) return undefined;
  const [low, high] = late.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
  return [low - .03 * (high - low), high + .03 * (high - low)];
}

function draw(fig) {
  const div = of('plot-' + fig.id), v = viewOf(fig);
  all(`#views-${fig.id} button`).forEach((b, n) => b.setAttribute('aria-pressed', fig.views[n] === v));
  const shown = v.traces.filter(visible);
  const axis = (title, log, zero) => ({
    title: {text: title, standoff: 8}, type: log ? 'log' : undefined, gridcolor: css('--line'),
    zeroline: !!zero, zerolinecolor: css('--muted'), zerolinewidth: 1.5, linecolor: css('--line'),
    automargin: true, exponentformat: 'SI', minexponent: 4,
  });
  const y = v.category ? {...axis('', false), type: 'category', autorange: 'reversed'} : axis(v.y, v.ylog, v.zero);
  const x = axis(v.x, v.xlog, v.zero_x);
  if (v.integers) x.dtick = 1;
  const places = new Set(shown.flatMap(t => t.x));
  if (places.size === 1 && !v.category && !v.heat) x.tickvals = [...places];
  if (v.heat) Object.assign(x, {type: 'category'}), Object.assign(y, {type: 'category', autorange: 'reversed'});
  if (v.focus) y.range = focus(shown);
  const clear = 'rgba(0,0,0,0)', few = new Set(shown.filter(t => !t.faint && !t.unnamed).map(t => t.arm)).size;
  const layout = {
    paper_bgcolor: paper ? '#ffffff' : clear, plot_bgcolor: clear,
    font: {color: css('--text'), size: 12.5, family: getComputedStyle(document.body).fontFamily},
    margin: {l: 60, r: 12, t: 28, b: 40}, xaxis: x, yaxis: y, hovermode: 'closest', width: paper ? 660 : undefined,
    showlegend: paper && !v.category && few > 1, legend: {orientation: 'h', y: -.2},
    hoverlabel: {bgcolor: css('--bg'), bordercolor: css('--line'), font: {color: css('--text')}, align: 'left'},
    modebar: {bgcolor: clear, color: css('--muted'), activecolor: css('--accent')},
    uirevision: v.label + state.lr, // a live page keeps the reader's zoom
  };
  if (v.category) layout.height = 110 + 26 * new Set(shown.flatMap(t => t.y)).size;
  div.style.height = v.category ? layout.height + 'px' : '';
  Plotly.react(div, shown.flatMap(t => plotlyTraces(t, v)), layout, {
    responsive: !paper, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
    toImageButtonOptions: {format: 'png', filename: fileOf(fig), scale: 2},
  });
  setTicks(div, v);
  if (!div.followed) div.on('plotly_relayout', () => setTicks(div, viewOf(D.figures.find(f => f.id === fig.id))));
  div.followed = true;
}

function drawSwatches() {
  all('svg[data-arm]').forEach(e => {
    Object.assign(e.style, {stroke: color(e.dataset.arm), display: place(e.dataset.arm) < 0 ? 'none' : ''});
    e.style.strokeDasharray = {solid: '', dash: '7 3', dot: '2 3', dashdot: '7 3 2 3'}[dash(e.dataset.arm)];
  });
}

function drawAll() {
  root.dataset.theme = theme();
  of('theme').textContent = theme() === 'dark' ? 'light' : 'dark';
  drawSwatches();
  all('#legend button').forEach(b => b.setAttribute('aria-pressed', !state.hidden.includes(b.dataset.of)));
  D.figures.forEach(draw);
  drawMaps();
}

of('theme').addEventListener('click', () => {
  state.theme = theme() === 'dark' ? 'light' : 'dark';
  save(); drawAll();
});
media.addEventListener('change', drawAll);
let back = null;
window.addEventListener('beforeprint', () => { back = onPaper(drawAll); });
window.addEventListener('afterprint', () => { if (back) back(); back = null; });
const rate = of('rate'), slider = of('smoothing');
if (rate) {
  if (![...rate.options].some(o => o.value === state.lr)) state.lr = D.main_rate;
  rate.value = state.lr;
  rate.addEventListener('change', () => { state.lr = rate.value; save(); drawAll(); });
}
if (slider) {
  const tell = () => { slider.nextElementSibling.textContent = `${100 * SHARES[state.smoothing]}%`; };
  slider.value = state.smoothing;
  tell();
  slider.addEventListener('input', () => {
    state.smoothing = Number(slider.value);
    tell(); save();
    D.figures.filter(f => viewOf(f).traces.some(t => t.smooth)).forEach(draw);
  });
}
if (of('arms')) of('arms').open = innerWidth > 700 && Object.keys(D.arms).length <= 10;
all('#legend button').forEach(b => b.addEventListener('click', () => {
  const arm = b.dataset.of;
  state.hidden = state.hidden.includes(arm) ? state.hidden.filter(a => a !== arm) : [...state.hidden, arm];
  save(); drawAll();
}));
all('.views button[data-figure]').forEach(b => b.addEventListener('click', () => {
  state.views[b.dataset.figure] = Number(b.dataset.view); save(); draw(current(b.dataset.figure));
}));
for (const which of ['arm', 'head']) {
  const s = of('map-' + which);
  if (s) s.addEventListener('change', () => { state.maps[which] = s.value; save(); drawMaps(); });
}
addTools(document);
drawAll();
window.scrollTo(0, state.scroll);
if (D.watch) setTimeout(() => { save(); location.reload(); }, 1000 * D.watch);

// ---- a live page: new tables and lines replace the old ones; with other figures the page reloads itself
const shape = d => JSON.stringify([Object.keys(d.arms), d.figures.map(f => [f.id, f.views.map(v => v.label)])]);
async function update() {
  const begun = Date.now();
  try {
    const answer = await fetch('data?at=' + D.version), news = answer.status === 200 ? await answer.json() : null;
    document.body.classList.remove('lost');
    const parts = news && Object.keys(news.html).length;
    if (news && (shape(news) !== shape(D) || all('[data-live]').length !== parts)) {
      save();
      location.reload();
      return;
    }
    if (news) {
      Object.assign(D, news);
      for (const e of all('[data-live]')) if (e.was !== news.html[e.dataset.live]) {
        e.innerHTML = e.was = news.html[e.dataset.live];
        addTools(e);
      }
      drawAll();
    }
  } catch { document.body.classList.add('lost'); }
  setTimeout(update, Math.max(2000, 5 * (Date.now() - begun)));
}
if (D.live) setTimeout(update, 2000);
