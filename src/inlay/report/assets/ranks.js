// Methods over tasks: mean ranks, with bars beside those that do not differ; the pairs in a table.
const LANE = 9;

function drawRanks(rows) {
  if (!DATA.over_tasks.length) return;
  const place = $('#tasks .panels');
  const shown = new Set(rows.map((row) => row.set));
  const groups = DATA.over_tasks.filter((each) => each.places.some((number) => shown.has(number)));
  place.replaceChildren();
  if (!groups.length) place.append(el('p', { class: 'note' }, 'No ranking for these filters.'));
  // All places first: how wide each one is depends on how many there are.
  const drawn = groups.slice(0, PANELS).map((group) => [panel(place), group]);
  if (groups.length > PANELS) place.append(el('p', { class: 'note' }, `${PANELS} of ${groups.length} rankings are drawn, the largest ones. Filter by model or examples to see the others.`));
  for (const [within, group] of drawn) (group.refusal ? refused : overTasks)(within, group);
}

function refused(place, group) {
  place.append(el('figcaption', {}, group.title, el('span', { class: 'kind' }, plural(group.tasks.length, 'task'))), el('p', {}, `Not ranked: ${group.refusal}.`));
  for (const text of group.notes) place.append(el('p', { class: 'note' }, text));
  if (group.missing.length) place.append(plainTable(`The missing results (${group.missing.length})`, ['task', 'method'], () => group.missing));
}

// The first lane in which a bar touches no other.
function lanes(cliques) {
  const ends = [];
  return cliques.map(([first, last]) => {
    let lane = ends.findIndex((end) => end < first);
    if (lane < 0) lane = ends.length;
    ends[lane] = last;
    return lane;
  });
}

function overTasks(place, group) {
  const test = group.p === null ? '' : `Friedman p ${group.p < .001 ? '< 0.001' : `= ${group.p.toFixed(3)}`}`;
  const inside = el('div', {});
  place.append(el('figcaption', {}, group.title, el('span', { class: 'kind' }, [`mean rank over ${group.tasks.length} tasks, 1 is best`, test].filter(Boolean).join('; '))), inside);
  const lane = lanes(group.cliques);
  const side = LANE * Math.max(0, ...lane.map((number) => number + 1)) + 6;
  const longest = Math.max(...group.methods.map((name) => name.length));
  const left = Math.min(longest * 6.8 + 12, 150) + side;
  const each = 24;
  const { drawn, at, box } = frame(inside, { x: { low: 1, high: group.methods.length, show: figure, label: 'mean rank' }, height: group.methods.length * each + 62, left,
    label: `Mean ranks of ${group.methods.length} methods over ${group.tasks.length} tasks. Arrow keys go from mark to mark.` });
  const heightOf = (index) => box.top + each * (index + .6);
  const alike = (one, other) => !group.pairs.some((pair) => pair.differs && [one, other].includes(pair.one) && [one, other].includes(pair.other));
  const spots = group.methods.map((method, index) => {
    const y = heightOf(index), x = at(group.ranks[index], 0)[0];
    const text = svg('text', { x: left - side - 5, y: y + 4, 'text-anchor': 'end', class: 'name' });
    text.textContent = method;
    drawn.append(text, mark(method, x, y, 6.4));
    const others = group.methods.filter((other) => other !== method && alike(method, other));
    return { x, y, title: method, lines: [`mean rank ${group.ranks[index].toFixed(2)}`, others.length === group.methods.length - 1 ? 'differs from none' : others.length ? `does not differ from ${others.join(', ')}` : 'differs from all'] };
  });
  group.cliques.forEach(([first, last], number) => {
    const x = left - side + 4 + LANE * lane[number];
    drawn.append(svg('path', { class: 'clique', d: `M${x} ${heightOf(first) - 7}V${heightOf(last) + 7}` }));
  });
  answers(drawn, spots);
  if (group.tasks.length < group.needed) place.append(el('p', { class: 'note' }, `${group.tasks.length} tasks are too few for any pair of ${group.methods.length} methods to differ, whatever the scores: that takes ${group.needed} tasks.`));
  for (const text of group.notes) place.append(el('p', { class: 'note' }, text));
  const p = (value) => value < .001 ? '< 0.001' : value.toFixed(3);
  const points = (value) => `${value > 0 ? '+' : ''}${(100 * value).toFixed(1)}`;
  place.append(plainTable(`All pairs (${group.pairs.length}) and the tasks (${group.tasks.length})`,
    ['method', 'and', 'better, equal, worse on', 'p (Holm)', 'significantly better', ...(group.share ? ['median gain, points'] : [])],
    () => group.pairs.map((pair) => [pair.one, pair.other, `${pair.better}, ${pair.equal}, ${pair.worse}`, p(pair.p), pair.differs ? pair.favours : 'neither', ...(group.share ? [points(pair.gap)] : [])]),
    `Tasks: ${group.tasks.join(', ')}. ${group.test === 'sign' ? 'Sign test: the tasks\u2019 metrics have no common unit.' : 'Wilcoxon signed-rank test.'}`));
}
