// The page, put together.
const cost = el('select', { id: 'axis', on: { change: () => { chosen.cost = cost.value; chosen.log = null; logBox.checked = Boolean(COSTS[cost.value].log); drawCost(shownRows); } } },
  ...Object.entries(COSTS).filter(([key]) => DATA.rows.some((row) => !missing(row[key]))).map(([key, how]) => el('option', { value: key }, how.label)));
const logBox = el('input', { type: 'checkbox', id: 'log', checked: true, on: { change: () => { chosen.log = logBox.checked; drawCost(shownRows); } } });
const curveKind = el('select', { id: 'curve', on: { change: () => { chosen.curve = curveKind.value; drawCurves(shownRows); } } },
  el('option', { value: 'validation' }, 'validation metric'), el('option', { value: 'loss' }, 'training loss'));
let shownRows = [];

function redraw() {
  shownRows = body();
  drawRanks(shownRows);
  drawCost(shownRows);
  drawSeeds(shownRows);
  if (!$('#curves').hidden) drawCurves(shownRows);
}

function intro() {
  const [tasks, models] = ['task', 'model'].map((key) => [...new Set(DATA.sets.map((each) => each[key]))]);
  $('#name').textContent = tasks.length * models.length === 1 ? `${tasks[0]} on ${models[0]}` : DATA.name;
  const parts = [plural(DATA.runs.length, 'finished run'), plural(METHODS.length, 'method'), plural(tasks.length, 'task'), plural(models.length, 'model')];
  const spent = DATA.runs.reduce((sum, run) => sum + (run.whole ?? 0), 0);
  if (spent) parts.push(`${duration(spent)} in all`);
  const lost = DATA.unfinished.length + DATA.damaged.length;
  if (lost) parts.push(`${lost} without a result`);
  const where = $('#name').textContent === DATA.name ? '' : `${DATA.name}: `;
  $('#lead').textContent = `${where}${parts.join(' · ')} · ${day(DATA.first)}${day(DATA.first) === day(DATA.last) ? '' : ` to ${day(DATA.last)}`}`;
  $('#findings').replaceChildren(...DATA.findings.slice(0, 6).map((text) => el('li', {}, text)));
  if (DATA.findings.length > 6) $('#findings').append(el('li', {}, `… and ${DATA.findings.length - 6} more comparisons: see the table.`));
}

const day = (time) => time.slice(0, 10);

function warned() {
  const kinds = { result: 'affects the results', cost: 'affects time and memory', note: 'good to know' };
  $('#warnings').hidden = !DATA.warnings.length;
  $('#warnings ul').replaceChildren(...DATA.warnings.map((each) => el('li', { class: `${each.level}-level` }, el('details', { open: each.level === 'result' },
    el('summary', {}, el('span', { class: 'sign', 'aria-hidden': 'true' }, each.level === 'note' ? 'i' : '!'), each.title, el('span', { class: 'kind' }, ` · ${kinds[each.level]}`)),
    el('p', {}, each.text)))));
}

function explanations() {
  $('#explanations').hidden = !DATA.explanations.length;
  $('#explanations .gallery').replaceChildren(...DATA.explanations.map((each) => el('figure', { class: 'card' },
    el('h3', {}, each.title), el('p', { class: 'note' }, each.subject), zoom(el('img', { src: each.picture, alt: `${each.title}: ${each.sentence}`, decoding: 'async' })),
    el('figcaption', {}, each.sentence), numbers(each), each.command ? command(each.command) : null)));
}

function zoom(image) {
  const button = el('button', { type: 'button', class: 'zoom', 'aria-pressed': 'false', title: 'Larger or smaller', on: { click: () => {
    button.setAttribute('aria-pressed', String(button.getAttribute('aria-pressed') === 'false'));
  } } }, image);
  return button;
}

function numbers(each) {
  return plainTable(`The data (${plural(each.rows.length + each.left_out, 'row')})`, each.columns.map((name) => name.replaceAll('_', ' ')), () => each.rows,
    each.left_out ? `${plural(each.left_out, 'more row')} in the CSV beside the figure.` : '');
}

function lost() {
  $('#lost').hidden = !(DATA.unfinished.length || DATA.damaged.length);
  $('#lost .cards').replaceChildren(
    ...DATA.unfinished.map((run) => el('div', { class: 'card' }, el('h3', {}, el('span', { class: 'status' }, run.status), ' ', el('code', {}, run.id)),
      run.error ? el('pre', {}, run.error) : null, command(run.command))),
    ...DATA.damaged.map((text) => el('div', { class: 'card' }, el('h3', {}, el('span', { class: 'status' }, 'unreadable')), el('pre', {}, text))));
}

function made() {
  const list = (title, entries) => entries.length ? el('div', { class: 'card' }, el('h3', {}, title), el('dl', {}, ...entries.flatMap(({ name, values, kinds }) => [
    el('dt', {}, name),
    el('dd', {}, ...values.map(({ value, runs }) => el('span', {}, said(value), values.length > 1 ? el('span', { class: 'kind' }, ` · ${plural(runs, 'run')}`) : null)),
      kinds > values.length ? el('span', { class: 'kind' }, `and ${kinds - values.length} more`) : null)]))) : null;
  const said = (value) => ({ null: 'not given', '[]': 'none', '{}': 'none' })[value] ?? value.replace(/^"(.*)"$/, '$1');
  const plain = (entries) => entries.map(({ name, source }) => ({ name, values: [{ value: source }] }));
  const settings = DATA.settings.map((each) => ({ ...each, name: each.name.replaceAll('_', ' ') }));
  const same = settings.filter((each) => each.kinds === 1), differing = settings.filter((each) => each.kinds > 1);
  $('#made .columns').replaceChildren(...[list('Differs between runs', differing), list('The same in all runs', same), list('Models', plain(DATA.models)), list('Data', plain(DATA.data)),
    list('Rows', DATA.examples.slice(0, 8).map((each) => ({ name: each.name, values: [{ value: `${figure(each.train, 9)} trained on, ${figure(each.validation, 9)} for validation, ${figure(each.test, 9)} tested` }] }))),
    list('Versions', DATA.versions), list('Machine', DATA.machine)].filter(Boolean));
  $('#foot').textContent = `Made by inlay ${DATA.version} on ${DATA.made.slice(0, 16).replace('T', ' ')} UTC. This file holds everything it shows and asks nothing of the network.${DATA.cut ? ' Paths of its maker\u2019s disk are cut to their names: put your own into commands that have them.' : ''}`;
}

function navigation() {
  const names = { results: 'Results', tasks: 'Over tasks', against: 'Before', inside: 'Mistakes', load: 'Load it', cost: 'Cost', seeds: 'Seeds', curves: 'Curves', explanations: 'Explanations', lost: 'Failed', made: 'What was run' };
  $('#nav').append(...Object.entries(names).filter(([id]) => !$(`#${id}`).hidden).map(([id, name]) => el('a', { href: `#${id}` }, name)));
}

function theme() {
  const root = document.documentElement, button = $('#theme');
  const wishes = ['auto', 'light', 'dark'];
  let wish = 'auto';
  try { wish = wishes.includes(localStorage.getItem('inlay-theme')) ? localStorage.getItem('inlay-theme') : 'auto'; } catch { /* a file may have no storage */ }
  const apply = () => {
    if (wish === 'auto') root.removeAttribute('data-theme'); else root.setAttribute('data-theme', wish);
    button.textContent = `Theme: ${wish}`;
  };
  button.addEventListener('click', () => {
    wish = wishes[(wishes.indexOf(wish) + 1) % wishes.length];
    try { localStorage.setItem('inlay-theme', wish); } catch { /* as above */ }
    apply();
  });
  apply();
}

theme();
intro();
warned();
filters(redraw);
header();
explanations();
against();
inside();
loading();
lost();
made();
$('#tasks').hidden = !DATA.over_tasks.length;
$('#curves').hidden = !DATA.runs.some((run) => Object.keys(run.curve).length);
$('#cost .controls').append(el('label', {}, 'Across', cost), el('label', { class: 'check' }, logBox, 'Logarithmic'));
$('#curves .controls').append(el('label', {}, 'Show', curveKind));
navigation();
redraw();
let width = innerWidth, waiting;
addEventListener('resize', () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (width !== innerWidth) { width = innerWidth; redraw(); } }, 120);
});
document.documentElement.setAttribute('data-ready', '');
