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
  for (const t of v.traces.filter(visible)) valuesOf(t).forEach((y, i) => {
    const e = t.error || t.xerror, at = t.error ? y : t.x[i];
    const [low, high] = t.low ? [t.low[i], t.high[i]] : e ? [at - e[i], at + e[i]] : ['', ''];
    rows.push([t.name, t.who || '', t.lr || '', t.x[i], y ?? '', low, high, (t.text || [])[i] || '']);
  });
  return rows;
}
function texFigure(fig) {
  const v = viewOf(fig), lines = v.traces.filter(t => visible(t) && !t.faint);
  const names = v.category ? [...new Set(lines.flatMap(t => t.y))] : [];
  const labels = names.map(n => `{${tex(n)}}`).join(','), rows = `ytick={1,...,${names.length}}, yticklabels={${labels}}`;
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
async function saveSvg(fig) {
  const back = onPaper(() => draw(fig)), div = of('plot-' + fig.id);
  await setTicks(div, viewOf(fig));
  const size = {width: 660, height: div._fullLayout.height};
  download(fileOf(fig) + '.svg', await Plotly.toImage(div, {format: 'svg', ...size}));
  back();
}
const button = (text, onclick) => make('button', {textContent: text, onclick});
const current = id => D.figures.find(f => f.id === id);
function addTools(inside) {
  for (const f of all('figure[id^=figure-]', inside)) {
    const id = f.id.slice(7);
    f.append(make('div', {className: 'tools'}, 'save ',
      button('CSV', () => downloadText(fileOf(current(id)) + '.csv', csv(figureRows(current(id))))),
      button('LaTeX', () => downloadText(fileOf(current(id)) + '.tex', texFigure(current(id)))),
      button('SVG', () => saveSvg(current(id)))));
    const pdf = make('a', {textContent: 'PDF', hidden: true});
    pdf.dataset.pdf = '';
    f.lastChild.append(pdf);
  }
  for (const t of all('.table', inside)) {
    const caption = () => t.querySelector('.note').textContent, name = t.id.slice(6);
    t.append(make('div', {className: 'tools'}, 'save ',
      button('CSV', () => downloadText(name + '.csv', csv(cellsOf(t)))),
      button('LaTeX', () => downloadText(name + '.tex', texTable(cellsOf(t), caption())))));
    all('th', t).forEach((th, column) => {
      th.replaceChildren(make('button', {textContent: th.textContent, title: 'sort', onclick: () => sort(t, column)}));
    });
  }
}

// Sorts by the first number of each cell where most have one, else by text; empty cells come last.
function sort(table, column) {
  const th = all('th', table)[column], up = th.ariaSort !== 'ascending', body = table.querySelector('tbody');
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
}
