// Handles theme, learning rate, smoothing and paper. sessionStorage keeps the state when a page reloads itself. D is
// the data of the report. page.py puts the other scripts before this file.
'use strict';
const root = document.documentElement, key = 'diffv2-lab:' + D.id;
const SHARES = [0, .005, .01, .02, .05, .1, .2, .4]; // of a line, that the running mean covers
const state = {
  theme: null, lr: D.main_rate, views: {}, maps: {}, hidden: D.hidden, single: D.single, scroll: 0, smoothing: 3,
  sorted: {},
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

const visible = (t, v) => (t.lr === null || state.lr === 'all' || t.lr === state.lr)
  && (v.category || v.heat || !state.hidden.includes(t.arm)) && (state.single || !t.faint || t.mode);
const valuesOf = t => t.smooth ? smooth(t.y) : t.y;
const nameOf = t => t.name + (state.lr === 'all' && t.lr ? ', ' + t.lr : '');
const viewOf = fig => fig.views[Math.min(state.views[fig.id] || 0, fig.views.length - 1)];

function focus(traces) { // the range of y without the first 5% of the axis, where lines are steep
  const ends = values => values.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  const [first, last] = ends(traces.flatMap(t => t.x)), start = first + .05 * (last - first);
  const late = traces.flatMap(t => t.y.filter((y, i) => y !== null && t.x[i] >= start));
  if (!late.length) return undefined;
  const [low, high] = ends(late);
  return [low - .03 * (high - low), high + .03 * (high - low)];
}

function drawSwatches() {
  all('svg[data-arm]').forEach(e => {
    Object.assign(e.style, {stroke: color(e.dataset.arm), display: place(e.dataset.arm) < 0 ? 'none' : ''});
    e.style.strokeDasharray = strokes[dash(e.dataset.arm)];
  });
}

function drawAll() {
  root.dataset.theme = theme();
  of('theme').textContent = theme() === 'dark' ? 'light' : 'dark';
  drawSwatches();
  all('#legend button').forEach(b => b.setAttribute('aria-pressed', !state.hidden.includes(b.dataset.of)));
  const lines = all('#legend button').length, less = all('#legend [aria-pressed=false]').length;
  if (lines) of('arms').firstChild.textContent = (less ? `${lines - less} of ` : '') + `${lines} lines`;
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
if (of('single')) {
  of('single').checked = state.single;
  of('single').addEventListener('change', () => { state.single = of('single').checked; save(); drawAll(); });
}
let wide = innerWidth;
window.addEventListener('resize', () => { if (innerWidth !== wide) wide = innerWidth, drawAll(); });
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
