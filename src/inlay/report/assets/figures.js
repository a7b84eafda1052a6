// The figures: cost, seeds, curves. Each draws the rows that the table shows, a panel for each comparison.
const PANELS = 6, LINES = 10, LISTED = 30;
const COSTS = Object.fromEntries(DATA.columns.filter((column) => column.plot && column.kind !== 'text').map((column) => [column.key, {
  label: column.plot, log: column.log, more: column.better === 'more',
  show: column.unit === 's' ? (value) => `${figure(value)} s` : WRITTEN[column.kind],
  scale: column.kind === 'bytes',
}]));
const chosen = { cost: 'trained', log: null, curve: 'validation' };

function bySet(rows) {
  const sets = new Map();
  for (const row of rows) sets.set(row.set, [...(sets.get(row.set) ?? []), row]);
  return [...sets.values()].sort((a, b) => b.length - a.length);
}

function panels(place, rows, draw) {
  const groups = bySet(rows);
  place.replaceChildren();
  // All places first: how wide each one is depends on how many there are.
  const drawn = groups.slice(0, PANELS).map((group) => [panel(place), group]);
  if (groups.length > PANELS) place.append(el('p', { class: 'note' }, `${PANELS} of ${groups.length} comparisons are drawn, the largest ones. Filter by task, model or examples to see the others.`));
  if (!groups.length) place.append(el('p', { class: 'note' }, 'Nothing to draw for these filters.'));
  for (const [within, group] of drawn) draw(within, group);
}

const bounds = (row) => missing(row.interval) ? [row.mean, row.mean] : [row.mean - row.interval, row.mean + row.interval];
// An axis shows the values and some room: the interval of two or three seeds can be far wider than all there is.
function shownSpan(rows, values) {
  const room = (Math.max(...values) - Math.min(...values)) * .35 || Math.max(...rows.map((row) => row.interval ?? 0));
  const near = (row) => bounds(row).map((value) => Math.max(row.mean - room, Math.min(row.mean + room, value)));
  return span([...values, ...rows.flatMap(near)], isShare(rows));
}

// The ends of a whisker, cut where the axis ends; an end that is cut has no cap.
function ends(row, place, from, to) {
  const [low, high] = bounds(row).map(place);
  const [least, most] = from < to ? [from, to] : [to, from];
  const cut = (value) => Math.max(least, Math.min(most, value));
  return { low: cut(low), high: cut(high), caps: [low, high].filter((value) => value >= least && value <= most) };
}

const told = (row) => [`${row.of.split} ${row.of.metric} ${score(row.mean)}${missing(row.interval) ? '' : ` ± ${score(row.interval)}`}, ${plural(row.runs.length, 'seed')}`];

function front(rows, cost) {
  const price = (row) => COSTS[cost].more ? -row[cost] : row[cost];
  const beats = (row, other) => row.beats.includes(DATA.rows.indexOf(other));
  // What was measured may cost less where the spreads overlap: what they alone decide is on no front.
  const spread = (row) => row.spreads[cost] ?? 0;
  const mayCostLess = (other, row) => price(other) !== price(row) && price(other) - spread(other) < price(row) + spread(row);
  return rows.filter((row) => !rows.some((other) => (mayCostLess(other, row) && !beats(row, other))
    || (price(other) === price(row) && beats(other, row)))).sort((a, b) => a[cost] - b[cost]);
}

function drawCost(rows) {
  const place = $('#cost .panels');
  const cost = chosen.cost, how = COSTS[cost];
  const known = rows.filter((row) => !missing(row[cost]) && row[cost] > 0);
  const log = chosen.log ?? Boolean(how.log);
  panels(place, known, (within, group) => {
    const [unit, name] = log || !how.scale ? [1, ''] : group.some((row) => row[cost] >= 2 ** 20) ? [2 ** 20, 'MiB'] : [2 ** 10, 'KiB'];
    const costs = group.map((row) => row[cost] / unit);
    const inside = captioned(within, group, `${group[0].of.split} ${group[0].of.metric} against ${how.label}`);
    const y = shownSpan(group, group.map((row) => row.mean));
    const x = log ? { low: Math.min(...costs), high: Math.max(...costs) } : span([0, ...costs], false);
    if (!log) x.low = 0;
    const show = unit === 1 ? how.show : figure;
    const { drawn, at, box } = frame(inside, { x: { ...x, log, show, label: unit === 1 ? how.label : `${how.label} (${name})` }, y,
      label: `${group[0].of.metric} against ${how.label}, ${plural(group.length, 'row')}. Arrow keys go from mark to mark.` });
    // Among variants of a method only the one that validation chose competes: the best by test would flatter.
    const best = front(group.filter((row) => row.chosen), cost);
    const points = best.map((row) => at(row[cost] / unit, row.mean));
    drawn.append(svg('path', { class: 'front', d: points.map(([a, b], i) => i ? (how.more ? `V${b}H${a}` : `H${a}V${b}`) : `M${a} ${b}`).join('') }));
    const spots = [];
    const order = [...group].sort((a, b) => best.includes(a) - best.includes(b));
    for (const row of order) {
      const [a, b] = at(row[cost] / unit, row.mean);
      const faded = best.includes(row) ? '' : 'off';
      const { low, high, caps } = ends(row, (value) => at(1, value)[1], box.top, box.bottom);
      if (low !== high && (row.chosen || group.length <= LISTED)) drawn.append(svg('path', { class: `whisker stroke ${look(row.method).colour} ${faded}`, d: `M${a} ${low}V${high}${caps.map((cap) => `M${a - 4} ${cap}h8`).join('')}` }));
      drawn.append(mark(row.method, a, b, best.includes(row) ? 7 : 5, faded));
      spots.push({ x: a, y: b, title: named(row), lines: [...told(row), `${how.label}: ${how.show(row[cost])}`, ...(row.verdict && row.verdict !== 'worse' ? [`beside the best: ${row.verdict}`] : []), ...(best.includes(row) ? ['on the front'] : [])] });
    }
    labels(drawn, best, points, box);
    answers(drawn, spots);
  });
  legend($('#cost .legend'), METHODS.filter((method) => known.some((row) => row.method === method)));
}

// Names beside the marks of the front, where they do not run into each other.
function labels(drawn, rows, points, box) {
  const taken = points.map(([x, y]) => [x - 8, y - 8, x + 8, y + 8]);
  rows.forEach((row, index) => {
    const [x, y] = points[index];
    const wide = row.method.length * 6.6 + 4;
    for (const [dx, dy] of [[11, 4], [-11 - wide, 4], [-wide / 2, -12], [-wide / 2, 21]]) {
      const area = [x + dx, y + dy - 11, x + dx + wide, y + dy + 3];
      if (area[0] < box.left || area[2] > box.right + 8 || area[1] < 0 || area[3] > box.bottom) continue;
      if (taken.some((other) => area[0] < other[2] && area[2] > other[0] && area[1] < other[3] && area[3] > other[1])) continue;
      taken.push(area);
      const text = svg('text', { x: x + dx, y: y + dy, class: 'name halo' });
      text.textContent = row.method;
      drawn.append(text);
      return;
    }
  });
}

function drawSeeds(rows) {
  panels($('#seeds .panels'), rows, (within, group) => {
    const listed = group.slice(0, LISTED);
    const more = group.length - listed.length;
    const inside = captioned(within, group, `${group[0].of.split} ${group[0].of.metric}${more ? `; the first ${LISTED} of ${group.length} rows` : ''}`);
    const left = Math.min(190, Math.max(100, inside.clientWidth * .34));
    const each = listed.some((row) => row.variant) ? 34 : 26;
    const height = listed.length * each + 62;
    const x = shownSpan(listed, listed.flatMap((row) => row.seeds.map((run) => run.value)));
    const { drawn, at, box } = frame(inside, { x: { ...x, show: figure, label: `${group[0].of.split} ${group[0].of.metric}` }, height, left,
      label: `Every seed of ${plural(listed.length, 'row')}. Arrow keys go from mark to mark.` });
    const spots = [];
    listed.forEach((row, index) => {
      const y = box.top + each * (index + .6);
      const { colour } = look(row.method);
      const room = Math.floor((left - 10) / 6.5);
      const write = (words, at, kind) => {
        const text = svg('text', { x: left - 9, y: at, 'text-anchor': 'end', class: kind });
        text.textContent = words.length > room ? `${words.slice(0, room - 1)}…` : words;
        drawn.append(text);
      };
      write(row.method, row.variant ? y - 2 : y + 4, 'name');
      if (row.variant) write(row.variant, y + 11, 'small');
      const { low, high, caps } = ends(row, (value) => at(value, 0)[0], box.left, box.right);
      if (low !== high) drawn.append(svg('path', { class: `whisker stroke ${colour}`, d: `M${low} ${y}H${high}${caps.map((cap) => `M${cap} ${y - 5}v10`).join('')}` }));
      const middle = at(row.mean, 0)[0];
      drawn.append(mark(row.method, middle, y, 6.4));
      spots.push({ x: middle, y, title: named(row), lines: told(row) });
      for (const run of row.seeds) {
        const a = at(run.value, 0)[0];
        drawn.append(mark(row.method, a, y, 3.2, 'seed'));
        spots.push({ x: a, y, title: `${named(row)}, seed ${run.seed}`, lines: [`${row.of.split} ${row.of.metric} ${score(run.value)}`, ...(missing(run.validation) || row.of.split === 'validation' ? [] : [`validation ${score(run.validation)}`])] });
      }
    });
    answers(drawn, spots);
  });
}

function drawCurves(rows) {
  const kind = chosen.curve;
  const known = rows.filter((row) => row.seeds.some((run) => run.curve[kind]));
  panels($('#curves .panels'), known, (within, group) => {
    const listed = group.slice(0, LINES);
    const what = kind === 'loss' ? 'training loss' : `validation ${group[0].of.metric}`;
    const more = group.length > LINES ? `; the first ${LINES} of ${group.length} rows of the table` : '';
    const inside = captioned(within, group, what + more);
    const curves = listed.flatMap((row) => row.seeds.flatMap((run) => run.curve[kind] ? [run.curve[kind]] : []));
    const x = span([0, ...curves.flatMap(([epochs]) => epochs)], false);
    const y = span(curves.flatMap(([, values]) => values), kind !== 'loss' && isShare(listed));
    const { drawn, at } = frame(inside, { x: { low: 0, high: x.high, show: figure, label: 'epoch' }, y, label: `${what} by epoch, ${plural(listed.length, 'row')}. Arrow keys go from mark to mark.` });
    const spots = [];
    for (const row of listed) {
      const { colour } = look(row.method);
      const path = ([epochs, values]) => epochs.map((epoch, i) => `${i ? 'L' : 'M'}${at(epoch, values[i]).map((n) => n.toFixed(1)).join(' ')}`).join('');
      const mine = row.seeds.flatMap((run) => run.curve[kind] ? [run.curve[kind]] : []);
      const mean = meanCurve(mine);
      if (mine.length > 1) for (const each of mine) drawn.append(svg('path', { class: `stroke off ${colour}`, 'stroke-width': .9, d: path(each) }));
      drawn.append(svg('path', { class: `stroke ${colour}`, 'stroke-width': 2.2, 'stroke-linejoin': 'round', 'stroke-dasharray': row.chosen ? null : '6 4', d: path(mean) }));
      const every = Math.ceil(mean[0].length / 10);
      mean[0].forEach((epoch, i) => {
        const [a, b] = at(epoch, mean[1][i]);
        if (i === mean[0].length - 1 || i % every === 0) drawn.append(mark(row.method, a, b, i === mean[0].length - 1 ? 5.5 : 3.6));
        spots.push({ x: a, y: b, title: named(row), lines: [`${what} ${figure(mean[1][i], 4)}`, `epoch ${figure(epoch)}`] });
      });
    }
    answers(drawn, spots);
  });
  legend($('#curves .legend'), METHODS.filter((method) => known.some((row) => row.method === method)));
}

// The mean at the epochs that all seeds have; of curves that share none, the first one.
function meanCurve(curves) {
  const shared = curves[0][0].filter((epoch) => curves.every(([epochs]) => epochs.includes(epoch)));
  if (!shared.length) return curves[0];
  return [shared, shared.map((epoch) => curves.reduce((sum, [epochs, values]) => sum + values[epochs.indexOf(epoch)], 0) / curves.length)];
}
