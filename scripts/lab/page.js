// Draws the figures with plotly and the attention maps on canvases, and handles the theme and the learning rate.
// sessionStorage keeps the state when --watch reloads the page. D is the data of the report.
'use strict';
const root = document.documentElement, key = 'diffv2-lab:' + D.id;
const state = {
  theme: null, lr: D.main_rate, views: {}, maps: {}, hidden: [], scroll: 0,
  ...JSON.parse(sessionStorage.getItem(key) || '{}'),
};
const save = () => { state.scroll = window.scrollY; sessionStorage.setItem(key, JSON.stringify(state)); };
const media = window.matchMedia('(prefers-color-scheme: dark)');
const theme = () => state.theme || (media.matches ? 'dark' : 'light');
const css = name => getComputedStyle(root).getPropertyValue(name).trim();
const color = arm =>
  arm === null ? css('--muted') : D.palette[theme()][D.arms.indexOf(arm) % D.palette.light.length];
const pale = (hex, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(',')},${alpha})`;

function plotlyTraces(t, all) {
  const c = color(t.arm), mode = t.mode || 'lines', name = t.name + (all && t.lr ? ', ' + t.lr : ''), out = [];
  if (t.low) {
    const band = {x: t.x, mode: 'lines', line: {width: 0}, hoverinfo: 'skip'};
    out.push({...band, y: t.low}, {...band, y: t.high, fill: 'tonexty', fillcolor: pale(c, .16)});
  }
  const bars = (v, axis) => v ? {[axis]: {type: 'data', array: v, thickness: 1.2, width: 4, color: c}} : {};
  const hover = (t.text ? '%{text}<br>' : '') + (t.faint ? t.name + '<br>' : '');
  out.push({
    x: t.x, y: t.y, mode, name, text: t.text || undefined, connectgaps: false,
    opacity: t.faint && mode === 'lines' ? .3 : t.faint ? .6 : 1,
    line: {color: c, width: t.faint ? 1 : 2, dash: t.dash ? 'dash' : 'solid'},
    marker: {color: c, size: t.faint ? 7 : t.symbol === 'triangle-up' ? 9 : 8, symbol: t.symbol || 'circle'},
    hovertemplate: hover + '%{x:.6g}, %{y:.5g}<extra>' + (t.faint ? '' : name) + '</extra>',
    ...bars(t.error, 'error_y'), ...bars(t.xerror, 'error_x'),
  });
  return out;
}

// Ticks of a logarithmic axis: the values if there are few, otherwise 1, 2 and 5 times powers of 10, or powers of 10.
function logTicks(values) {
  const own = [...new Set(values.filter(x => x > 0))].sort((a, b) => a - b), ticks = [];
  const low = own[0], high = own[own.length - 1], steps = high / low > 300 ? [1] : [1, 2, 5];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++)
    for (const m of steps) ticks.push(m * 10 ** k);
  const at = own.length <= 12 ? own : ticks;
  const label = x => x >= 1e5 || x < 1e-4 ? x.toExponential() : String(Number(x.toPrecision(3)));
  return {tickmode: 'array', tickvals: at, ticktext: at.map(label)};
}

function draw(fig) {
  const div = document.getElementById('plot-' + fig.id);
  const i = Math.min(state.views[fig.id] || 0, fig.views.length - 1), v = fig.views[i];
  document.querySelectorAll(`#views-${fig.id} button`).forEach((b, n) => b.setAttribute('aria-pressed', n === i));
  const all = state.lr === 'all';
  const visible = t => (t.lr === null || all || t.lr === state.lr) && !state.hidden.includes(t.arm);
  const traces = v.traces.filter(visible).flatMap(t => plotlyTraces(t, all));
  const axis = (title, log, zero) => ({
    title: {text: title, standoff: 8}, type: log ? 'log' : undefined, gridcolor: css('--line'),
    zeroline: !!zero, zerolinecolor: css('--muted'), zerolinewidth: 1.5, linecolor: css('--line'),
    automargin: true, exponentformat: 'SI', minexponent: 4,
  });
  const y = v.category ? {...axis('', false), type: 'category', autorange: 'reversed'} : axis(v.y, v.ylog, v.zero);
  const x = axis(v.x, v.xlog, v.zero_x);
  if (v.integers) x.dtick = 1;
  if (v.range) y.range = v.range;
  if (v.xlog) Object.assign(x, logTicks(v.traces.flatMap(t => t.x)));
  if (v.ylog) Object.assign(y, logTicks(v.traces.flatMap(t => t.y)));
  const clear = 'rgba(0,0,0,0)';
  const layout = {
    paper_bgcolor: clear, plot_bgcolor: clear, font: {color: css('--text'), size: 12.5, family: 'inherit'},
    margin: {l: 60, r: 12, t: 28, b: 40}, xaxis: x, yaxis: y, hovermode: 'closest', showlegend: false,
    hoverlabel: {bgcolor: css('--bg'), bordercolor: css('--line'), font: {color: css('--text')}},
    modebar: {bgcolor: clear, color: css('--muted'), activecolor: css('--accent')},
  };
  Plotly.react(div, traces, layout, {
    responsive: true, displaylogo: false, modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
    toImageButtonOptions: {format: 'png', filename: fig.id, scale: 2},
  });
}

// ---- attention maps: the lower triangle row by row, sqrt(value) as bytes, base64
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
function square(packed, n) {
  const b = bytes(packed), m = new Float32Array(n * n);
  let i = 0;
  for (let t = 0; t < n; t++) for (let j = 0; j <= t; j++) m[t * n + j] = (b[i++] / 255) ** 2;
  return m;
}
const shown = [];

function paint(canvas, values, n, diverging) {
  const rgb = name => { const h = css(name); return [1, 3, 5].map(i => parseInt(h.slice(i, i + 2), 16)); };
  const zero = rgb('--bg'), up = rgb('--accent'), down = rgb('--bad'), image = new ImageData(n, n);
  let top = 0;
  for (const x of values) top = Math.max(top, Math.abs(x));
  for (let i = 0; i < n * n; i++) {
    const x = values[i] / (top || 1), w = Math.sqrt(Math.abs(x)), to = diverging && x < 0 ? down : up;
    for (let k = 0; k < 3; k++) image.data[4 * i + k] = zero[k] + (to[k] - zero[k]) * w;
    image.data[4 * i + 3] = (i % n) > Math.floor(i / n) ? 40 : 255;
  }
  canvas.width = canvas.height = n;
  canvas.getContext('2d').putImageData(image, 0, 0);
}

function drawMaps() {
  if (!D.maps.length) return;
  const m = state.maps;
  if (!D.maps.some(a => a.arm === m.arm)) m.arm = (D.maps.find(a => a.heads[0].a2) || D.maps[0]).arm;
  const arm = D.maps.find(a => a.arm === m.arm);
  if (!arm.heads.some(h => h.name === m.head)) m.head = arm.sharpest;
  const head = arm.heads.find(h => h.name === m.head), n = arm.tokens.length;
  const fill = (id, options, value) => document.getElementById(id).replaceChildren(
    ...options.map(([v, text]) => new Option(text, v, false, v === value)));
  fill('map-arm', D.maps.map(a => [a.arm, a.label]), m.arm);
  fill('map-head', arm.heads.map(h => [h.name, h.title]), m.head);
  const a1 = square(head.a1, n), a2 = head.a2 && square(head.a2, n), lambda = head.lambda;
  const effective = a2 && a1.map((x, i) => x - lambda[Math.floor(i / n)] * a2[i]);
  const panels = a2 ? [['A1', a1, false], ['A2', a2, false], ['A1 - s A2', effective, true]] : [['A', a1, false]];
  shown.length = 0;
  const box = document.getElementById('maps');
  box.replaceChildren(...panels.map(([title, values, diverging], p) => {
    const [f, canvas, caption] = ['div', 'canvas', 'figcaption'].map(tag => document.createElement(tag));
    canvas.setAttribute('role', 'img');
    canvas.setAttribute('aria-label', `${title}, ${arm.label}, ${head.title}`);
    let low = 0, high = 0;
    for (const x of values) { low = Math.min(low, x); high = Math.max(high, x); }
    caption.textContent = `${title}: ${diverging ? low.toFixed(3) + ' to ' : 'up to '}${high.toFixed(3)}`;
    paint(canvas, values, n, diverging);
    shown.push({title, values, n, tokens: arm.tokens});
    canvas.addEventListener('mousemove', e => {
      const box = canvas.getBoundingClientRect();
      const at = (position, size) => Math.floor(position / size * n);
      const j = at(e.clientX - box.left, box.width), t = at(e.clientY - box.top, box.height);
      if (j < 0 || t < 0 || j >= n || t >= n || j > t) return;
      document.getElementById('pointed').textContent = `query ${t} (${arm.tokens[t]}), key ${j} (${arm.tokens[j]}): `
        + shown.map(s => `${s.title} ${s.values[t * n + j].toFixed(4)}`).join(', ');
    });
    f.append(canvas, caption);
    return f;
  }));
}

function drawAll() {
  root.dataset.theme = theme();
  document.getElementById('theme').textContent = theme() === 'dark' ? 'light' : 'dark';
  document.querySelectorAll('[data-arm]').forEach(e => { e.style.background = color(e.dataset.arm); });
  document.querySelectorAll('#legend button').forEach(
    b => b.setAttribute('aria-pressed', !state.hidden.includes(b.dataset.of)));
  D.figures.forEach(draw);
  drawMaps();
}

document.getElementById('theme').addEventListener('click', () => {
  state.theme = theme() === 'dark' ? 'light' : 'dark';
  save(); drawAll();
});
media.addEventListener('change', drawAll);
const rate = document.getElementById('rate');
if (rate) {
  if (![...rate.options].some(o => o.value === state.lr)) state.lr = D.main_rate;
  rate.value = state.lr;
  rate.addEventListener('change', () => { state.lr = rate.value; save(); drawAll(); });
}
document.querySelectorAll('#legend button').forEach(b => b.addEventListener('click', () => {
  const arm = b.dataset.of;
  state.hidden = state.hidden.includes(arm) ? state.hidden.filter(a => a !== arm) : [...state.hidden, arm];
  save(); drawAll();
}));
document.querySelectorAll('.views button[data-figure]').forEach(b => b.addEventListener('click', () => {
  state.views[b.dataset.figure] = Number(b.dataset.view); save(); draw(D.figures.find(f => f.id === b.dataset.figure));
}));
for (const which of ['arm', 'head']) {
  const s = document.getElementById('map-' + which);
  if (s) s.addEventListener('change', () => { state.maps[which] = s.value; save(); drawMaps(); });
}
drawAll();
window.scrollTo(0, state.scroll);
if (D.watch) setTimeout(() => { save(); location.reload(); }, 1000 * D.watch);
