// page_files.js: saves tables and figures as files that the browser makes, without a server; sorts tables.
const fileOf = fig => (fig.id + '-' + viewOf(fig).label).replace(/[^A-Za-z0-9]+/g, '-');
function download(name, url) { make('a', {href: url, download: name}).click(); }
const downloadText = (name, text) => {
  const url = URL.createObjectURL(new Blob([text], {type: 'text/plain;charset=utf-8'}));
  download(name, url);
  setTimeout(() => URL.revokeObjectURL(url), 60000);
};
const quoted = c => /[",\n]/.test(c) ? `"${String(c).replaceAll('"', '""')}"` : c;
const csv = rows => rows.map(r => r.map(quoted).join(',') + '\n').join('');
const TEX = {
  '\\': '\\textbackslash{}', '~': '\\textasciitilde{}', '^': '\\textasciicircum{}', '–': '--', '±': '$\\pm$',
  '<': '\\textless{}', '>': '\\textgreater{}', '|': '\\textbar{}',
};
const tex = text => String(text).replace(/[\\~^–±<>|&%$#_{}]/g, c => TEX[c] || '\\' + c);
const cellsOf = table => all('tr', table).map(row => [...row.cells].map(cell =>
  [...cell.childNodes].filter(n => n.nodeName !== 'A').map(n => n.textContent).join('').trim()));
function texTable(rows, caption) {
  const lines = rows.map(r => '  ' + r.map(tex).join(' & ') + ' \\\\');
  const columns = 'l' + 'r'.repeat(rows[0].length - 1);
  return [
    '% requires \\usepackage{booktabs}', '\\begin{table}', '\\centering', `\\begin{tabular}{${columns}}`, '  \\toprule',
    lines[0], '  \\midrule', ...lines.slice(1), '  \\bottomrule', '\\end{tabular}',
    `\\caption{${tex(caption)}}`, '\\end{table}', '',
  ].join('\n');
}
function figureRows(fig) { // one row per point
  const v = viewOf(fig), rows = [['line', 'of', 'rate', v.x, v.y, 'low', 'high', 'note']];
  for (const t of v.traces.filter(t => visible(t, v))) valuesOf(t).forEach((y, i) => {
    const e = t.error || t.xerror, at = t.error ? y : t.x[i];
    const [low, high] = t.low ? [t.low[i], t.high[i]] : e ? [at - e[i], at + e[i]] : ['', ''];
    rows.push([t.name, t.who || '', t.lr || '', t.x[i], y ?? '', low, high, (t.text || [])[i] || '']);
  });
  return rows;
}
function texFigure(fig) {
  const v = viewOf(fig), lines = v.traces.filter(t => visible(t, v) && !t.faint);
  const names = v.category ? [...new Set(lines.flatMap(t => t.y))] : [];
  const labels = names.map(n => `{${tex(n)}}`).join(',');
  const rows = `ytick={1,...,${names.length}}, yticklabels={${labels}}`;
  const axis = [
    `xlabel={${tex(v.x)}}`, `ylabel={${tex(v.y)}}`, 'legend style={font=\\tiny}', 'width=\\linewidth',
    ...(v.xlog ? ['xmode=log'] : []), ...(v.ylog ? ['ymode=log'] : []),
    ...(v.category ? [rows, 'y dir=reverse'] : []),
  ];
  const plot = t => {
    if (t.z) return `  \\addplot+[only marks,nodes near coords,point meta=explicit symbolic] coordinates {`
      + `${t.x.map((x, i) => `(${x},${t.y[i]}) [${tex(t.text[i])}]`).join(' ')}};\n`;
    const marks = /markers/.test(t.mode || '') ? (/lines/.test(t.mode) ? '' : 'only marks,') : 'no marks,';
    const point = (y, i) => y === null ? '' : `(${t.x[i]},${v.category ? names.indexOf(y) + 1 : y})`
      + (t.error || t.xerror ? ` +- (${t.xerror ? t.xerror[i] : 0},${t.error ? t.error[i] : 0})` : '');
    const way = t.error ? 'y' : 'x', bars = t.error || t.xerror ? `error bars/.cd,${way} dir=both,${way} explicit` : '';
    return `  \\addplot+[${marks}${bars}] coordinates {${valuesOf(t).map(point).join(' ')}};\n`
      + (v.category ? '' : `  \\addlegendentry{${tex(nameOf(t))}}\n`);
  };
  return `% requires \\usepackage{pgfplots}\n\\begin{tikzpicture}\n\\begin{axis}[${axis.join(', ')}]\n`
    + lines.map(plot).join('') + '\\end{axis}\n\\end{tikzpicture}\n';
}
function onPaper(draws) { // draws as on paper, and returns a function that draws as on the screen again
  paper = true;
  root.dataset.theme = 'light';
  draws();
  return () => { paper = false; drawAll(); };
}
function figureSvg(fig) {
  const back = onPaper(() => draw(fig)), text = new XMLSerializer().serializeToString(of('plot-' + fig.id).firstChild);
  back();
  return text;
}

const xml = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
function textLines(node) { // [{text, box}] of a text, as the page breaks it into lines
  const range = document.createRange(), lines = [];
  [...node.data].reduce((start, c) => {
    range.setStart(node, start);
    range.setEnd(node, start + c.length);
    const box = range.getBoundingClientRect(), last = lines[lines.length - 1];
    if (last && box.top < last.box.bottom) last.text += c;
    else if (box.width) lines.push({text: c, box});
    return start + c.length;
  }, 0);
  return lines;
}
function tableSvg(t) { // the texts and lines at their places on the page, without links
  const back = onPaper(drawSwatches), table = t.querySelector('table'), box = table.getBoundingClientRect();
  const at = (x, y, names) => `${names[0]}="${(x - box.left).toFixed(1)}" ${names[1]}="${(y - box.top).toFixed(1)}"`;
  const line = (x1, x2, y, stroke, more) =>
    `<line ${at(x1, y, ['x1', 'y1'])} ${at(x2, y, ['x2', 'y2'])} stroke="${stroke}" ${more || ''}/>\n`;
  const texts = node => textLines(node).map(({text, box}) => {
    const style = getComputedStyle(node.parentNode), size = parseFloat(style.fontSize);
    const font = `font-size="${size}" font-weight="${style.fontWeight}" fill="${style.color}"`;
    return `<text ${at(box.left, (box.top + box.bottom) / 2 + .35 * size, 'xy')} ${font}>${xml(text)}</text>\n`;
  }).join('');
  const parts = all('tr', table).map(row => line(box.left, box.right, row.getBoundingClientRect().bottom, '#d9dee4'));
  for (const e of all('svg.swatch', table)) {
    const b = e.getBoundingClientRect(), dashes = `stroke-width="2.5" stroke-dasharray="${e.style.strokeDasharray}"`;
    parts.push(line(b.left, b.right, (b.top + b.bottom) / 2, e.style.stroke, dashes));
  }
  const walk = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) if (!walk.currentNode.parentNode.closest('a')) parts.push(texts(walk.currentNode));
  back();
  const size = `width="${Math.ceil(box.width)}" height="${Math.ceil(box.height)}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="sans-serif">\n${parts.join('')}</svg>\n`;
}

function printOnly(e) { // the browser's dialog saves it as a PDF file with one page of its size
  const size = `${Math.max(700, ...all('table', e).map(t => t.offsetWidth)) + 20}px ${e.offsetHeight + 60}px`;
  const style = make('style', {textContent: `@page { size: ${size}; margin: 10px; }`});
  document.head.append(style);
  document.body.classList.add('one');
  e.classList.add('only');
  window.addEventListener('afterprint', () => {
    style.remove();
    document.body.classList.remove('one');
    e.classList.remove('only');
  }, {once: true});
  window.print();
}

const button = (text, onclick) => make('button', {textContent: text, onclick});
const current = id => D.figures.find(f => f.id === id);
function figureTools(f) {
  const fig = () => current(f.id.slice(7)), name = () => fileOf(fig()), file = () => viewOf(fig()).file;
  return make('div', {className: 'tools'}, 'save ',
    button('CSV', () => downloadText(name() + '.csv', csv(figureRows(fig())))),
    button('LaTeX', () => downloadText(name() + '.tex', texFigure(fig()))),
    button('SVG', () => downloadText(name() + '.svg', figureSvg(fig()))),
    button('PDF', () => file() ? download(name() + '.pdf', file() + '.pdf') : printOnly(f))); // the report's files
}
function tableTools(t) {
  const name = t.id.slice(6), caption = () => t.querySelector('.note').textContent;
  return make('div', {className: 'tools'}, 'save ',
    button('CSV', () => downloadText(name + '.csv', csv(cellsOf(t)))),
    button('LaTeX', () => downloadText(name + '.tex', texTable(cellsOf(t), caption()))),
    button('SVG', () => downloadText(name + '.svg', tableSvg(t))),
    button('PDF', () => printOnly(t)));
}
function addTools(inside) {
  for (const f of all('figure[id^=figure-]', inside)) f.append(figureTools(f));
  for (const t of all('.table', inside)) {
    t.append(tableTools(t));
    all('th', t).forEach((th, column) => {
      th.replaceChildren(make('button', {textContent: th.textContent, title: 'sort', onclick: () => sort(t, column)}));
    });
    if (state.sorted[t.id]) sort(t, ...state.sorted[t.id]);
  }
}

// Sorts by the first number of each cell where most have one, else by text; empty cells come last.
function sort(table, column, up = all('th', table)[column].ariaSort !== 'ascending') {
  const th = all('th', table)[column], body = table.querySelector('tbody');
  const texts = new Map(all('tr', body).map(row => [row, row.cells[column].textContent.trim()]));
  const value = text => {
    const m = /^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?([kMGTP]\b)?/.exec(text);
    return m ? parseFloat(m[0].replaceAll(',', '')) * 1000 ** (' kMGTP'.indexOf(m[2] || ' ')) : NaN;
  };
  const known = [...texts.values()].filter(t => t !== '–');
  const numeric = known.filter(t => !isNaN(value(t))).length * 2 > known.length;
  const empty = text => numeric ? isNaN(value(text)) : text === '–';
  const order = (a, b) => empty(a) - empty(b)
    || (empty(a) ? 0 : (up ? 1 : -1) * (numeric ? value(a) - value(b) : a.localeCompare(b)));
  all('th', table).forEach(h => { h.ariaSort = h === th ? (up ? 'ascending' : 'descending') : null; });
  body.append(...all('tr', body).sort((a, b) => order(texts.get(a), texts.get(b))));
  state.sorted[table.id] = [column, up]; // a page that reloads itself keeps the order
}
