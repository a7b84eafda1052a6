// What a method gets right and wrong, from its predictions on the test rows: drawn for the one that is chosen.
const percent = (share, digits = 1) => missing(share) ? '–' : `${(100 * share).toFixed(digits)} %`;
const whole = (value) => missing(value) ? '–' : Number(value.toFixed(1)).toLocaleString('en');
const CELL = 10;  // shades of a cell

function inside() {
  const place = $('#inside');
  place.hidden = !DATA.inside.length;
  if (place.hidden) return;
  const several = new Set(DATA.inside.map((each) => each.row)).size !== DATA.inside.length;
  const name = (each) => { const row = DATA.rows[each.row]; return `${named(row)}${several ? `: ${each.task}` : ''}${DATA.sets.length > 1 ? ` (${row.of.label})` : ''}`; };
  const choice = el('select', { id: 'inside-row', on: { change: () => draw(Number(choice.value)) } }, ...DATA.inside.map((each, index) => el('option', { value: index }, name(each))));
  $('.controls', place).append(el('label', {}, 'Method', choice));
  if (DATA.inside_left) $('.controls', place).append(el('p', { class: 'note' }, `${plural(DATA.inside_left, 'row')} more kept predictions: make a report of fewer runs to see them.`));
  const draw = (index) => { const each = DATA.inside[index]; $('.looked', place).replaceChildren(...looked(each, DATA.rows[each.row]).filter(Boolean)); };
  draw(0);
}

function looked(each, row) {
  const trained = missing(each.trained) ? '' : `trained on ${plural(each.trained, 'row')}, `;
  const seeds = each.seeds > 1 ? ` The ${each.seeds} seeds are counted together.` : '';
  const about = el('p', { class: 'note' }, `${named(row)}: ${trained}tested on ${plural(each.tested, 'row')}.${seeds}`);
  const parts = { class: [confused, matrix, calibrated], rank: [confused, matrix, calibrated], shares: [apart, confused, matrix], values: [everyValue], vector: [ranks], labels: [found], tags: [found, confused, matrix], value: [values], text: [losses], masked: [masks, losses], span: [answered, calibrated] }[each.predicts] ?? [];
  return [about, ...parts.map((draw) => draw(each)), mistakes(each)];
}

function titled(title, note, ...children) {
  return el('div', { class: 'look' }, el('h3', {}, title), note ? el('p', { class: 'note' }, note) : null, ...children);
}

function tableOf(heads, rows, kind = '') {
  return el('div', { class: 'scroll', tabindex: 0 }, el('table', { class: kind },
    el('thead', {}, el('tr', {}, ...heads.map((head, index) => el('th', { scope: 'col', class: index ? 'num' : null }, head)))),
    el('tbody', {}, ...rows.map(([first, ...rest]) => el('tr', {}, el('th', { scope: 'row' }, first), ...rest.map((cell) => el('td', { class: 'num' }, cell)))))));
}

function confused(each) {
  const counted = each.classes.some(([, trained]) => !missing(trained));
  const words = each.predicts === 'tags' ? 'words' : 'rows';
  const classes = tableOf(['Class', ...(counted ? ['Trained on'] : []), `Test ${words}`, 'Precision', 'Recall', 'F1'],
    each.classes.map(([index, trained, tested, precision, recall, f1]) => [each.names[index], ...(counted ? [whole(trained)] : []), whole(tested), percent(precision), percent(recall), percent(f1)]), 'tight');
  const most = each.confused.map(([a, b, count, all]) => el('li', {}, el('b', {}, each.names[a]), ' taken for ', el('b', {}, each.names[b]), `: ${plural(count, 'time')}, ${percent(count / all, 0)} of ${each.names[a]}`));
  return el('div', { class: 'columns' },
    titled('Scores by class', 'Precision: of the rows predicted as this class, the share that is right. Recall: of the rows of this class, the share that was found.', classes),
    titled('Most often mixed up', null, most.length ? el('ol', { class: 'mixed' }, ...most) : el('p', {}, 'Nothing: every test row is right.')));
}

function matrix(each) {
  if (!each.matrix) return titled('Confusion matrix', `With ${each.names.length} classes it is too large to show; the pairs above are its largest entries.`);
  const kept = each.names.map((_, index) => index).filter((i) => each.matrix[i].some(Boolean) || each.matrix.some((line) => line[i]));
  const cell = (i, j) => {
    const all = each.matrix[i].reduce((sum, count) => sum + count, 0), count = each.matrix[i][j];
    const shade = count ? Math.max(1, Math.round(CELL * count / all)) : 0;
    return el('td', { class: `${i === j ? 'hit' : 'miss'} s${shade}`, title: `${each.names[i]}, taken for ${each.names[j]}: ${count} of ${all}` }, count || '·');
  };
  return titled('Confusion matrix', 'Rows are the true class, columns what was predicted; the shade is the share of the row.',
    el('div', { class: 'scroll fit', tabindex: 0 }, el('table', { class: 'matrix' },
      el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'true \\ predicted'), ...kept.map((j) => el('th', { scope: 'col' }, each.names[j])))),
      el('tbody', {}, ...kept.map((i) => el('tr', {}, el('th', { scope: 'row' }, each.names[i]), ...kept.map((j) => cell(i, j))))))));
}

function calibrated(each) {
  const place = el('div', { class: 'plot' });
  const gap = each.bins.reduce((sum, [count, sure, right]) => sum + count * (sure - right), 0);
  const way = each.ece < .03 ? 'The probabilities can be taken as they are.' : gap > 0 ? 'The model is overconfident.' : 'The model is underconfident.';
  const made = titled('Can its probabilities be trusted?', `Expected calibration error (ECE): ${percent(each.ece)}. On average over 15 bins, the probability of a prediction differs by this much from the share that is right. ${way} On the dashed line they agree.`, place);
  requestAnimationFrame(() => reliability(place, each));
  return made;
}

function reliability(place, each) {
  const ends = { low: 0, high: 1, show: figure };
  const { drawn, at, box } = frame(place, { x: { ...ends, label: 'probability of the prediction' }, y: { low: 0, high: 1 }, label: `Share of right predictions against their probability, ${plural(each.bins.length, 'bin')}. Arrow keys go from mark to mark.` });
  drawn.append(svg('path', { class: 'front', d: `M${at(0, 0).join(' ')}L${at(1, 1).join(' ')}` }));
  const all = each.bins.reduce((sum, [count]) => sum + count, 0);
  for (const [count, sure] of each.bins) {  // how many there are, as bars from below
    const [x] = at(sure, 0), height = (box.bottom - box.top) * .25 * count / all;
    drawn.append(svg('rect', { class: 'share', x: x - 7, width: 14, y: box.bottom - height, height }));
  }
  drawn.append(svg('path', { class: 'stroke k0', 'stroke-width': 2, d: each.bins.map(([, sure, right], i) => `${i ? 'L' : 'M'}${at(sure, right).join(' ')}`).join('') }));
  const spots = each.bins.map(([count, sure, right]) => {
    const [x, y] = at(sure, right);
    drawn.append(svg('circle', { class: 'mark k0', cx: x, cy: y, r: 5 }));
    return { x, y, title: `${plural(count, 'prediction')}`, lines: [`probability ${percent(sure)} on average`, `right ${percent(right)}`] };
  });
  answers(drawn, spots);
}

function found(each) {
  if (!each.found.length) return null;
  const [title, note, name] = each.predicts === 'tags' ? ['Entities', 'One is right when its type and both its ends are.', 'Type']
    : ['Scores by label', 'Precision: of the rows predicted to have this label, the share that has it. Recall: of the rows with this label, the share that was found.', 'Label'];
  return titled(title, note, tableOf([name, 'In the test', 'Precision', 'Recall', 'F1'],
    each.found.map(([name, present, ...scores]) => [name, whole(present), ...scores.map((share) => percent(share))]), 'tight'));
}

function values(each) {
  const { mean, median, most, explained } = each.errors;
  const place = el('div', { class: 'plot' });
  const made = titled('Predicted and true values', `Errors: ${figure(mean)} on average, ${figure(median)} or less for half of the rows, ${figure(most)} or less for 90 %.${missing(explained) ? '' : ` ${percent(explained)} of the variance is explained (R²).`} On the dashed line both are the same.`, place);
  requestAnimationFrame(() => {
    const both = span(each.points.flat(), false);
    const { drawn, at } = frame(place, { x: { ...both, show: figure, label: 'true value' }, y: both, label: `Predicted against true values of ${plural(each.points.length, 'row')}. Arrow keys go from mark to mark.` });
    drawn.append(svg('path', { class: 'front', d: `M${at(both.low, both.low).join(' ')}L${at(both.high, both.high).join(' ')}` }));
    answers(drawn, each.points.map(([truth, said]) => {
      const [x, y] = at(truth, said);
      drawn.append(svg('circle', { class: 'mark k0 off', cx: x, cy: y, r: 4 }));
      return { x, y, title: `predicted ${figure(said)}`, lines: [`true ${figure(truth)}`] };
    }));
  });
  return made;
}

function apart(each) {
  return titled('Probabilities', `On average ${percent(each.apart)} of the probability lies on other classes than it should. Below, the likeliest class stands for a row.`);
}

function everyValue(each) {
  return titled('Errors by value', 'The mean of the absolute error, what 90 % of the rows stay below, and the share of the variance that is explained (R²).',
    tableOf(['Value', 'Mean error', '90 % below', 'R²'], each.each.map(([name, mean, most, explained]) => [name, figure(mean), figure(most), percent(explained)]), 'tight'));
}

function ranks(each) {
  const [first, five, ten] = each.ranks.map((share) => percent(share));
  return titled('What a search finds', `What belongs to a query is found first for ${first}, among the first five for ${five}, among the first ten for ${ten}. The median rank is ${figure(each.median)}.`);
}

function answered(each) {
  return titled('Answers', 'F1: how many words an answer shares with the right one. Seen: how often the model says rightly that there is an answer, or that there is none.',
    tableOf(['The question', 'In the test', 'F1', 'Seen'], each.answered.map(([name, tested, fit, seen]) => [name, whole(tested), percent(fit), percent(seen)]), 'tight'));
}

function masks(each) {
  const [hidden, right] = each.masks;
  return titled('Masked tokens', `Of ${plural(hidden, 'masked token')} the model predicts ${percent(right)} correctly.`);
}

function losses(each) {
  const [least, low, middle, high, most] = each.losses.map((value) => figure(value));
  return titled('Loss by row', `Half of the test rows have a mean loss between ${low} and ${high}, with ${middle} in the middle; the smallest is ${least}, the largest ${most}.`);
}

function mistakes(each) {
  if (!each.mistakes.length) return null;
  const sure = ['class', 'rank', 'span'].includes(each.predicts);
  const title = { class: 'The most confident mistakes', rank: 'The most confident mistakes', shares: 'The rows farthest from their labels', value: 'The largest errors', values: 'The largest errors', vector: 'The rows found last', labels: 'The rows with most wrong labels', tags: 'The rows with most wrong words', text: 'The hardest rows', span: 'The most confident mistakes' }[each.predicts] ?? 'Rows';
  return titled(title, sure ? 'Look here for wrong labels in the data, and for what the model cannot see.' : null, el('div', { class: `mistakes${each.mistakes[0].image ? ' pictures' : ''}` }, ...each.mistakes.map((row) => mistake(each, row, sure))));
}

function mistake(each, row, sure) {
  const own = row.image && /\.\w+$/.test(row.file ?? '');  // a file of its own needs no number
  const where = [row.file === 'all' ? null : row.file, missing(row.number) || own ? null : `row ${row.number.toLocaleString('en')}`].filter(Boolean).join(', ');
  const said = (value) => typeof value === 'number' ? figure(value, 4) : value;
  const often = each.seeds > 1 && sure ? ` · wrong with ${row.wrong} of ${each.seeds} seeds` : '';
  return el('figure', { class: 'mistake' },
    row.image ? el('img', { src: row.image, alt: `Test image ${where}`, loading: 'lazy', decoding: 'async' }) : null,
    row.text ? el('blockquote', {}, row.text) : null,
    el('figcaption', {},
      missing(row.prediction) ? null : el('div', { class: 'bad' }, 'predicted ', el('b', {}, said(row.prediction)), missing(row.score) ? null : ` (${percent(row.score, 0)})`),
      missing(row.label) ? null : el('div', {}, 'true ', el('b', {}, said(row.label))),
      each.predicts === 'vector' ? el('div', { class: 'bad' }, 'found at rank ', el('b', {}, row.weight.toLocaleString('en'))) : null,
      each.predicts === 'text' ? el('div', {}, `loss ${figure(row.weight)}`) : null,
      el('div', { class: 'kind' }, `${where}${often}`)));
}

// What changed since an earlier folder, where one was given.
function against() {
  const place = $('#against');
  place.hidden = !DATA.against;
  if (place.hidden) return;
  $('h2', place).textContent = `Against ${DATA.against.name}`;
  const words = { better: 'better', worse: 'worse', 'not distinguishable': 'no significant difference', 'too few seeds': 'too few common seeds' };
  const several = new Set(DATA.against.changes.map((each) => each.place)).size > 1;
  const notes = (each) => [each.differing.length ? `other ${each.differing.join(', ')}` : null, each.other_data ? 'other rows of data' : null].filter(Boolean).join('; ');
  $('.table', place).replaceChildren(tableOf(['Method', ...(several ? ['Comparison'] : []), 'Metric', 'Before', 'Now', 'Seeds', 'Gain', 'Verdict', 'Not the same'],
    DATA.against.changes.map((each) => [each.method, ...(several ? [each.place] : []), each.metric, score(each.before), score(each.now), each.seeds, each.difference ?? '–',
      missing(each.before) ? 'new' : missing(each.now) ? 'only there' : words[each.verdict] ?? 'no common seed', notes(each) || '–'])));
}

// How to load a run: the code of the one that is chosen, with its own folder in it.
function loading() {
  const place = $('#load');
  const options = DATA.loads.flatMap((each) => DATA.rows[each.row].seeds.map((run) => ({ each, run, row: DATA.rows[each.row] })));
  place.hidden = !options.length;
  if (place.hidden) return;
  const several = DATA.sets.length > 1, label = ({ each, run, row }) => `${named(row)}, seed ${run.seed}${missing(each.task) ? '' : `: ${each.task}`}${several ? ` (${row.of.label})` : ''}`;
  const choice = el('select', { id: 'load-run', on: { change: () => draw(options[Number(choice.value)]) } }, ...options.map((option, index) => el('option', { value: index }, label(option))));
  $('.controls', place).append(el('label', {}, 'Run', choice));
  const code = (title, note, text, run) => titled(title, note, command(text.trimEnd().replaceAll('this/run', run.place), 'code'));
  const draw = ({ each, run }) => {
    const base = (each.card ?? '').match(/"(\.\/[^"]+)"/);
    const needs = base ? ` The base model is your own folder: put its path in place of ${base[1]}.` : '';
    $('.looked', place).replaceChildren(...[
      code('With inlay', `The run knows its base model and how its inputs are prepared. ${run.place} is a path from where the command was given.`, each.short, run),
      el('p', { class: 'note' }, 'Every prediction on the rows that were held out: ', el('code', {}, `${run.place}/predictions/`), ', a Parquet file a task.'),
      each.card ? code('With PEFT and Transformers', `To share the model, send the adapter folder. This is the code in its README.${needs}`, each.card, run) : null].filter(Boolean));
  };
  draw(options[0]);
}
