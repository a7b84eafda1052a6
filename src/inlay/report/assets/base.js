// What all parts share: the data, numbers in words, and elements made without markup in strings.
const DATA = JSON.parse(document.getElementById('data').textContent);
const $ = (selector, within = document) => within.querySelector(selector);

function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'on') for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ''));
  return made;
}

function svg(tag, given = {}, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(given)) if (value !== undefined && value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const missing = (value) => value === null || value === undefined;
const plural = (count, one, many = `${one}s`) => `${count.toLocaleString('en')} ${count === 1 ? one : many}`;
const score = (value) => missing(value) ? '–' : Math.abs(value) >= 100 ? value.toFixed(1) : value.toFixed(4);

function figure(value, digits = 3) {
  if (missing(value)) return '–';
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString('en', { maximumFractionDigits: 8 });
}

function count(value) {
  if (missing(value)) return '–';
  for (const [size, letter] of [[1e9, 'B'], [1e6, 'M'], [1e3, 'k']]) if (value >= size) return figure(value / size) + letter;
  return figure(value, 4);
}

function bytes(value) {
  if (missing(value)) return '–';
  for (const [size, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) if (value >= size) return `${figure(value / size)} ${unit}`;
  return `${value} B`;
}

function duration(seconds) {
  if (missing(seconds)) return '–';
  for (const [size, unit] of [[3600, 'h'], [60, 'min']]) if (seconds >= size) return `${figure(seconds / size)} ${unit}`;
  return `${figure(seconds)} s`;
}

const WRITTEN = { count, bytes, duration, number: (value) => figure(value), text: (value) => value ?? '–' };
const shotsOf = (row) => missing(row.of.shots) ? 'all' : row.of.shots.toLocaleString('en');
const named = (row) => row.variant ? `${row.method} (${row.variant})` : row.method;

// A colour and a shape for every method: either alone tells neighbours apart.
const METHODS = [...new Set(DATA.rows.map((row) => row.method))].sort();
const look = (method) => {
  const index = METHODS.indexOf(method);
  return { colour: `k${index % 7}`, shape: (index + Math.floor(index / 7)) % 7 };
};

const SHAPES = [
  (r) => `M${-r} 0A${r} ${r} 0 1 1 ${r} 0A${r} ${r} 0 1 1 ${-r} 0Z`,
  (r) => { const a = r * .88; return `M${-a} ${-a}H${a}V${a}H${-a}Z`; },
  (r) => { const a = r * 1.25; return `M0 ${-a}L${a} 0L0 ${a}L${-a} 0Z`; },
  (r) => { const a = r * 1.15; return `M0 ${-a}L${a} ${a * .8}H${-a}Z`; },
  (r) => { const a = r * 1.15; return `M0 ${a}L${a} ${-a * .8}H${-a}Z`; },
  (r) => { const a = r * 1.1, b = r * .4; return `M${-b} ${-a}H${b}V${-b}H${a}V${b}H${b}V${a}H${-b}V${b}H${-a}V${-b}H${-b}Z`; },
  (r) => { const a = r * 1.1, b = r * .4; return `M0 ${-b}L${a - b} ${-a}L${a} ${b - a}L${b} 0L${a} ${a - b}L${a - b} ${a}L0 ${b}L${b - a} ${a}L${-a} ${a - b}L${-b} 0L${-a} ${b - a}L${b - a} ${-a}Z`; },
];

function mark(method, x, y, r, more = '') {
  const { colour, shape } = look(method);
  return svg('path', { d: SHAPES[shape](r), transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, class: `mark ${colour} ${more}` });
}

function swatch(method) {
  return svg('svg', { width: 14, height: 14, viewBox: '-7 -7 14 14', 'aria-hidden': 'true' }, mark(method, 0, 0, 5));
}

function legend(place, methods) {
  place.replaceChildren(...methods.map((method) => el('span', {}, swatch(method), method)));
}

function command(line, what = 'command') {
  const button = el('button', { type: 'button', class: 'copy', 'aria-label': `Copy this ${what}`, on: { click: copy } }, 'Copy');
  async function copy() {
    try {
      await navigator.clipboard.writeText(line);
      button.textContent = 'Copied';
    } catch {
      const range = document.createRange();
      range.selectNodeContents(text);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = document.execCommand('copy') ? 'Copied' : 'Selected';
    }
    setTimeout(() => { button.textContent = 'Copy'; }, 1600);
  }
  const text = el('code', {}, line);
  return el('div', { class: 'cmd' }, text, button);
}

// A table that is made when it is opened.
function plainTable(title, columns, rows, below) {
  const made = el('details', {}, el('summary', {}, title));
  made.addEventListener('toggle', () => {
    if (made.children.length > 1) return;
    made.append(el('div', { class: 'plain', tabindex: 0 }, el('table', {},
      el('thead', {}, el('tr', {}, ...columns.map((name) => el('th', { scope: 'col' }, name)))),
      el('tbody', {}, ...rows().map((row) => el('tr', {}, ...row.map((cell) => el('td', {}, String(cell)))))))));
    if (below) made.append(el('p', { class: 'note' }, below));
  });
  return made;
}

for (const row of DATA.rows) {
  row.of = DATA.sets[row.set];
  row.seeds = row.runs.map((number) => DATA.runs[number]);
}
