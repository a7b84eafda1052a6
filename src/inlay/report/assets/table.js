// The table: sorting by its headers, filtering, rows that open to their runs.
const PAGE = 50;
const state = { sort: null, down: false, filters: {}, text: '', chosen: false, open: new Set(), all: false };

const COLUMNS = [
  { key: 'method', label: 'Method', get: named },
  { key: 'mean', label: 'Result', get: (row) => row.mean, show: result, num: true },
  { key: 'task', label: 'Task', get: (row) => row.of.task },
  { key: 'model', label: 'Model', get: (row) => row.of.model },
  { key: 'shots', label: 'Examples', get: (row) => row.of.shots ?? Infinity, show: shotsOf, num: true, better: 'less' },
  { key: 'metric', label: 'Metric', get: (row) => `${row.of.split} ${row.of.metric}` },
  { key: 'n', label: 'Seeds', get: (row) => row.runs.length, num: true },
  ...DATA.columns.map((column) => ({
    ...column, get: (row) => row[column.key], show: (row) => measured(row, column), num: column.kind !== 'text',
  })),
];
// Columns with one value throughout are said once, above the table.
const CONSTANT = ['task', 'model', 'shots', 'metric'].filter((key) => new Set(DATA.rows.map(COLUMNS.find((c) => c.key === key).get)).size === 1);
const VISIBLE = COLUMNS.filter((column) => !CONSTANT.includes(column.key));

function measured(row, column) {
  const spread = row.spreads[column.key];
  return [WRITTEN[column.kind](row[column.key]), ...(missing(spread) ? [] : [el('span', { class: 'pm' }, ` ± ${WRITTEN[column.kind](spread)}`)])];
}

function result(row) {
  const parts = [score(row.mean)];
  if (!missing(row.interval)) parts.push(el('span', { class: 'pm' }, ` ± ${score(row.interval)}`));
  const many = DATA.rows.some((other) => other !== row && other.set === row.set);
  if (row.best && many) parts.push(el('span', { class: 'tag best' }, 'best'));
  const tag = { 'not distinguishable': '≈ best', 'too few seeds': 'too few seeds' }[row.verdict];
  if (tag) parts.push(el('span', { class: 'tag tie' }, tag));
  return parts;
}

const hasVariants = DATA.rows.some((row) => !row.chosen);
state.chosen = hasVariants && DATA.rows.length > PAGE;  // a long grid begins with what was chosen of it

function words(row) {
  row.words ??= [named(row), row.of.task, row.of.model, row.of.metric, shotsOf(row), ...row.seeds.map((run) => run.id)].join(' ').toLowerCase();
  return row.words;
}

// What the table is filtered by: columns, of the method's its name without the variant; and what is in no column.
const FILTERS = [
  { key: 'task' }, { key: 'data', label: 'Data', get: (row) => row.of.data }, { key: 'kind', label: 'Kind of task', get: (row) => row.of.kind },
  { key: 'model' }, { key: 'shots' }, { key: 'family', label: 'Family of methods', get: (row) => DATA.families[row.method] }, { key: 'method', get: (row) => row.method }, { key: 'metric' },
].map((each) => ({ ...COLUMNS.find((column) => column.key === each.key), ...each }));
const filtered = (key) => FILTERS.find((each) => each.key === key).get;

function visibleRows() {
  const wanted = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  return DATA.rows.filter((row) => (!state.chosen || row.chosen)
    && Object.entries(state.filters).every(([key, value]) => !value || String(filtered(key)(row)) === value)
    && wanted.every((word) => words(row).includes(word)));
}

function sorted(rows) {
  const column = COLUMNS.find((each) => each.key === state.sort);
  if (!column) return rows;
  const sign = state.down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [column.get(a), column.get(b)];
    if (missing(x) || missing(y)) return missing(x) - missing(y);
    return sign * (typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y);
  });
}

function header() {
  $('#table thead').replaceChildren(el('tr', {}, ...VISIBLE.map((column) => {
    const active = state.sort === column.key;
    const way = el('span', { class: 'dir', 'aria-hidden': 'true' }, active ? (state.down ? '▼' : '▲') : '');
    const button = el('button', { type: 'button', 'data-key': column.key, title: column.about, on: { click: () => sortBy(column.key) } },
      ...(column.num ? [way, column.label] : [column.label, way]));
    return el('th', { scope: 'col', class: column.num && 'num', 'aria-sort': active ? (state.down ? 'descending' : 'ascending') : 'none' }, button);
  })));
}

function sortBy(key) {
  const column = COLUMNS.find((each) => each.key === key);
  state.down = state.sort === key ? !state.down : Boolean(column.num) && column.better !== 'less';
  state.sort = key;
  header();
  body();
  $(`#table thead [data-key="${key}"]`).focus();
}

function body() {
  const rows = sorted(visibleRows());
  const lines = [];
  for (const row of state.all ? rows : rows.slice(0, PAGE)) {
    lines.push(line(row));
    if (state.open.has(row)) lines.push(detail(row));
  }
  if (!rows.length) lines.push(el('tr', { class: 'empty' }, el('td', { colspan: VISIBLE.length }, 'Nothing matches. Clear a filter to see more.')));
  const sets = new Set(rows.map((row) => row.set));
  lines.push(...DATA.references.filter((each) => sets.has(each.set)).map(reference));
  $('#table tbody').replaceChildren(...lines);
  const more = $('#more');
  more.hidden = state.all || rows.length <= PAGE;
  more.textContent = `Show all ${rows.length.toLocaleString('en')} rows`;
  const runs = rows.reduce((sum, row) => sum + row.runs.length, 0);
  $('#shown').textContent = `${rows.length.toLocaleString('en')} of ${plural(DATA.rows.length, 'row')}, ${plural(runs, 'run')}. Open a row to see its runs and their commands.`;
  return rows;
}

function line(row) {
  const cells = VISIBLE.slice(1).map((column) => {
    const shown = column.show ? column.show(row) : String(column.get(row));
    return el('td', { class: column.num && 'num' }, ...(Array.isArray(shown) ? shown : [shown]));
  });
  const button = el('button', { type: 'button', class: 'open', 'aria-expanded': state.open.has(row) ? 'true' : 'false', on: { click: toggle } },
    el('span', { class: 'turn', 'aria-hidden': 'true' }, '▸'), swatch(row.method), el('span', { class: 'method' }, row.method),
    hasVariants && row.chosen && row.variant ? el('span', { class: 'tag set' }, 'chosen') : null);
  // The row opens where nothing else is to be clicked; a text that was just selected in it is not a click.
  const press = (event) => { if (!event.target.closest('a, button') && getSelection().isCollapsed) toggle(); };
  const made = el('tr', { class: 'row', on: { click: press } }, el('th', { scope: 'row' }, button, row.variant ? el('span', { class: 'variant' }, row.variant) : null), ...cells);
  function toggle() {
    const open = !state.open.has(row);
    button.setAttribute('aria-expanded', String(open));
    if (open) { state.open.add(row); made.after(detail(row)); } else { state.open.delete(row); made.nextSibling.remove(); }
  }
  return made;
}

// What a score has to beat, at the end of the table: it has no runs to open.
function reference({ set, name, mean }) {
  const of = DATA.sets[set];
  const said = { mean: score(mean), task: of.task, model: of.model, shots: shotsOf({ of }), metric: `${of.split} ${of.metric}` };
  return el('tr', { class: 'reference' }, el('th', { scope: 'row' }, name),
    ...VISIBLE.slice(1).map((column) => el('td', { class: column.num && 'num' }, said[column.key] ?? '–')));
}

function detail(row) {
  const settings = Object.entries(row.settings).map(([key, value]) => `${key.replaceAll('_', ' ')} ${typeof value === 'object' ? JSON.stringify(value) : value}`).join(', ');
  const fact = (label, value) => el('span', {}, `${label} `, el('b', {}, value));
  const runs = row.seeds.map((run) => el('div', { class: 'run' },
    el('div', { class: 'facts' }, fact('seed', String(run.seed)), fact(`${row.of.split} ${row.of.metric}`, score(run.value)),
      missing(run.validation) || row.of.split === 'validation' ? null : fact(`validation${run.watched === row.of.metric ? '' : ` ${run.watched}`}`, score(run.validation)),
      ...Object.entries(run.others).map(([name, value]) => fact(name, score(value))),
      fact('s / epoch', figure(run.seconds)), fact('memory', bytes(run.memory)), fact('updates', figure(run.steps, 6)), el('span', {}, el('code', {}, run.id))),
    command(run.command)));
  return el('tr', { class: 'detail' }, el('td', { colspan: VISIBLE.length },
    el('div', { class: 'inner' }, el('p', { class: 'note' }, `${settings}.`), ...runs)));
}

function filters(changed) {
  $('#more').addEventListener('click', () => { state.all = true; body(); });
  const place = $('.filters');
  let timer;
  const search = el('input', { type: 'search', id: 'search', placeholder: 'method, task, model, run …', autocomplete: 'off', on: { input: () => {
    clearTimeout(timer);
    timer = setTimeout(() => { state.text = search.value; changed(); }, 80);
  } } });
  place.append(el('label', {}, 'Search', search));
  for (const { key, label, get } of FILTERS) {
    const values = [...new Set(DATA.rows.map(get))].sort((a, b) => typeof a === 'number' ? a - b : a.localeCompare(b));
    // What is read says nothing more where each kind of data has one kind of task.
    if (values.length < 2 || (key === 'data' && values.length === new Set(DATA.rows.map(filtered('kind'))).size)) continue;
    const select = el('select', { 'data-key': key, on: { change: () => { state.filters[key] = select.value; changed(); } } },
      el('option', { value: '' }, 'all'), ...values.map((value) => el('option', { value: String(value) }, value === Infinity ? 'all there are' : String(value))));
    place.append(el('label', {}, label, select));
  }
  if (hasVariants) {
    const box = el('input', { type: 'checkbox', id: 'chosen', checked: state.chosen, on: { change: () => { state.chosen = box.checked; changed(); } } });
    place.append(el('label', { class: 'check' }, box, 'Only the variant chosen on the validation set'));
  }
  const said = CONSTANT.map((key) => { const c = COLUMNS.find((each) => each.key === key); return `${c.label.toLowerCase()} ${c.show ? c.show(DATA.rows[0]) : c.get(DATA.rows[0])}`; });
  $('#same').textContent = said.length ? `In all rows: ${said.join(', ')}.` : '';
}
