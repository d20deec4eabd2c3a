// page_maps.js: draws attention maps on canvases. A map is packed: the lower triangle row by row, sqrt(value) as bytes,
// base64.
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
  const fill = (id, options, value) => of(id).replaceChildren(
    ...options.map(([v, text]) => new Option(text, v, false, v === value)));
  fill('map-arm', D.maps.map(a => [a.arm, a.label]), m.arm);
  fill('map-head', arm.heads.map(h => [h.name, h.title]), m.head);
  const a1 = square(head.a1, n), a2 = head.a2 && square(head.a2, n), lambda = head.lambda;
  const effective = a2 && a1.map((x, i) => x - lambda[Math.floor(i / n)] * a2[i]);
  const panels = a2 ? [['A1', a1, false], ['A2', a2, false], ['A1 - s A2', effective, true]] : [['A', a1, false]];
  shown.length = 0;
  const box = of('maps');
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
      of('pointed').textContent = `query ${t} (${arm.tokens[t]}), key ${j} (${arm.tokens[j]}): `
        + shown.map(s => `${s.title} ${s.values[t * n + j].toFixed(4)}`).join(', ');
    });
    f.append(canvas, caption);
    return f;
  }));
}
