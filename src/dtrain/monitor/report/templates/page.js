// What the page does by itself: it tells values where one points, hides runs, and draws the loss otherwise.
// The page is whole without it. It puts text in as text only, and asks for nothing; only a live page listens to
// its own server, which sends blocks of the page in place of older ones.
(() => {
'use strict';
const tip = document.getElementById('tip');
const short = v => {
  if (v === null) return 'no number';
  const size = Math.abs(v);
  if (v !== 0 && (size >= 1e7 || size < 1e-3)) return v.toExponential(2);
  return size >= 1000 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(4));
};
const tell = {
  number: short,
  percent: v => v === null ? short(v) : short(v * 100) + ' %',
  seconds: v => {
    if (v === null) return short(v);
    if (v >= 3600) return Math.floor(v / 3600) + ' h ' + Math.round(v % 3600 / 60) + ' min';
    if (v >= 60) return Math.floor(v / 60) + ' min ' + Math.round(v % 60) + ' s';
    if (v >= 1 || v === 0) return +v.toPrecision(3) + ' s';
    return v >= 1e-3 ? +(v * 1e3).toPrecision(3) + ' ms' : +(v * 1e6).toPrecision(3) + ' µs';
  },
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; xs[mid] < x ? low = mid : high = mid; }
  return x - xs[low] <= xs[high] - x ? low : high;
};
const hide = () => {
  tip.hidden = true;
  document.querySelectorAll('.cross').forEach(c => { c.style.visibility = 'hidden'; });
};
const make = (name, text) => {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
};
const fitted = new ResizeObserver(entries => entries.forEach(({target, contentRect}) =>
  target.style.setProperty('--zoom', Math.max(1, contentRect.width / target.viewBox.baseVal.width))));
const showValues = plot => {
  plot.querySelectorAll('svg[role=img]').forEach(svg => fitted.observe(svg));
  const holder = plot.parentNode.querySelector('script');
  if (!holder) return;
  let data = null, at = 0;
  const svg = plot.querySelector('svg'), cross = svg.querySelector('.cross');
  // One chart may be drawn twice, for a narrow place and a wide one; its values are there once.
  const wider = svg.viewBox.baseVal.width - plot.parentNode.querySelector('svg').viewBox.baseVal.width;
  const load = () => {
    if (data) return data;
    data = JSON.parse(holder.textContent);
    data.box[1] += wider;
    return data;
  };
  const seen = () => load().lines.filter(l => l.run === null || !hidden.has(l.run));
  const show = (x, left, top) => {
    const [from, to] = load().box, [first, last] = data.ends;
    const lines = seen();
    if (!lines.length) return hide();
    const close = lines.map(l => l.x[nearest(l.x, x)])
      .reduce((a, b) => Math.abs(a - x) <= Math.abs(b - x) ? a : b);
    const place = from + (close - first) / (last - first) * (to - from);
    cross.setAttribute('x1', place); cross.setAttribute('x2', place);
    cross.style.visibility = 'visible';
    tip.replaceChildren(make('b', data.axis + ' ' + tell[data.units[0]](close)));
    const reach = (last - first) / 40;
    lines.map(l => [l, nearest(l.x, close)]).filter(([l, i]) => Math.abs(l.x[i] - close) <= reach)
      .sort((a, b) => (b[0].y[b[1]] ?? -Infinity) - (a[0].y[a[1]] ?? -Infinity)).slice(0, 20)
      .forEach(([l, i]) => {
        const row = make('div', '');
        row.className = 's' + l.style;
        row.append(make('i', ''), make('span', l.name), make('em', tell[data.units[1]](l.y[i])));
        tip.append(row);
      });
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const beside = left + 16 + box.width > innerWidth ? left - 16 - box.width : left + 16;
    tip.style.left = Math.max(8, Math.min(beside, innerWidth - box.width - 8)) + 'px';
    tip.style.top = Math.max(8, Math.min(top + 12, innerHeight - box.height - 8)) + 'px';
  };
  svg.addEventListener('pointermove', event => {
    const area = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const [from, to] = load().box, [first, last] = data.ends;
    const share = ((event.clientX - area.left) / area.width * width - from) / (to - from);
    show(first + Math.min(Math.max(share, 0), 1) * (last - first), event.clientX, event.clientY);
  });
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('blur', hide);
  svg.addEventListener('keydown', event => {
    const lines = seen();
    if (event.key === 'Escape') return hide();
    if (!['ArrowLeft', 'ArrowRight', 'Home', 'End'].includes(event.key) || !lines.length) return;
    event.preventDefault();
    const xs = lines.reduce((a, b) => b.x.length > a.x.length ? b : a).x;
    const jump = Math.max(1, Math.round(xs.length / 60));
    const next = tip.hidden ? at : at + jump;
    at = { ArrowLeft: at - jump, ArrowRight: next, Home: 0, End: xs.length - 1 }[event.key];
    at = Math.max(0, Math.min(at, xs.length - 1));
    const area = svg.getBoundingClientRect(), [from, to] = load().box, [first, last] = data.ends;
    const place = from + (xs[at] - first) / (last - first) * (to - from);
    show(xs[at], area.left + place / svg.viewBox.baseVal.width * area.width, area.top + 24);
  });
};
const drawn = (svg, name, attributes, text) => {
  const made = document.createElementNS(svg.namespaceURI, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text || '';
  return made;
};
const ticks = (low, high, log) => {
  const found = [];
  if (log) {
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of high / low > 30 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
    const inside = found.filter(v => v >= low && v <= high);
    const apart = Math.ceil(inside.length / 6);
    return inside.length < 2 ? [low, high] : inside.filter((_, place) => place % apart === 0);
  }
  const least = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(factor => factor * unit).find(size => size >= least * (1 - 1e-9));
  for (let place = Math.ceil(low / step); place * step <= high; place++)
    found.push(+(place * step).toPrecision(9));
  return found;
};
// As TensorBoard: a mean that forgets, without the pull of where it began.
const smoothed = (values, weight) => {
  let sum = 0, all = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight); all = all * weight + 1 - weight;
    return sum / all;
  });
};
const chosen = {};  // by the title of a chart, as the chart may be replaced
const adjust = figure => {
  const plot = figure.querySelector('.plot'), svg = plot.querySelector('svg');
  const data = JSON.parse(plot.querySelector('script').textContent);
  const [left, right] = data.box, [first, last] = data.ends, [top, base] = data.heights;
  const values = data.lines.flatMap(line => line.y.filter(v => v !== null));
  const lowest = Math.min(...values), highest = Math.max(...values), room = (highest - lowest || 1) * .06;
  const groups = [...svg.querySelectorAll('.series')], plain = groups.map(group => [...group.childNodes]);
  const axis = [...svg.querySelectorAll('.grid, .tick[text-anchor=end]')], note = figure.querySelector('.by');
  const title = figure.querySelector('h3').textContent;
  let log = data.log, weight = 0, added = [];
  if (chosen[title] && lowest > 0) log = chosen[title].log;
  if (chosen[title]) weight = chosen[title].weight;
  const range = () => log === data.log ? data.values
    : log ? [lowest / 1.2, highest * 1.2] : [lowest - room, highest + room];
  const draw = () => {
    const [low, high] = range();
    const share = v => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    const y = v => base - Math.min(Math.max(share(v), 0), 1) * (base - top);
    const x = v => left + (v - first) / (last - first) * (right - left);
    const path = (xs, ys) => {
      let down = false;
      return xs.map((at, place) => {
        const value = ys[place], from = down;
        down = value !== null;
        if (value === null) return '';
        return (from ? 'L' : 'M') + x(at).toFixed(1) + ' ' + y(value).toFixed(1) + (from ? '' : 'h0');
      }).join('');
    };
    const same = log === data.log && !weight;
    groups.forEach((group, number) => {
      const line = data.lines[number];
      if (same) return group.replaceChildren(...plain[number]);
      const curve = plain[number][0].cloneNode(), raw = plain[number][0].cloneNode();
      curve.setAttribute('d', path(line.x, smoothed(line.y, weight)));
      raw.setAttribute('d', path(line.x, line.y));
      raw.classList.add('raw');
      group.replaceChildren(...(weight ? [raw, curve] : [curve]));
    });
    added.forEach(each => each.remove());
    added = [];
    axis.forEach(each => { each.style.display = log === data.log ? '' : 'none'; });
    if (log !== data.log) added = ticks(low, high, log).flatMap(value => [
      drawn(svg, 'line', {'class': 'grid', x1: left, x2: right, y1: y(value), y2: y(value)}),
      drawn(svg, 'text', {'class': 'tick', 'text-anchor': 'end', x: left - 6, y: y(value)},
        short(value)),
    ]);
    svg.prepend(...added);
    if (note) note.hidden = !log;
    chosen[title] = {log, weight};
  };
  const controls = make('div', '');
  controls.className = 'adjust';
  if (lowest > 0) {
    const button = make('button', 'log axis');
    button.type = 'button';
    button.setAttribute('aria-pressed', String(log));
    button.addEventListener('click', () => {
      log = !log;
      button.setAttribute('aria-pressed', String(log));
      draw();
    });
    controls.append(button);
  }
  const label = make('label', 'smoothing '), input = make('input', '');
  Object.assign(input, {type: 'range', min: 0, max: .99, step: .01, value: weight});
  input.addEventListener('input', () => { weight = Number(input.value); draw(); });
  label.append(input);
  controls.append(label);
  figure.querySelector('figcaption').append(controls);
  if (chosen[title]) draw();
};
const start = block => {
  block.querySelectorAll('.plot').forEach(showValues);
  block.querySelectorAll('.adjustable').forEach(adjust);
};
const hidden = new Set();
document.querySelectorAll('[data-toggle]').forEach(button => button.addEventListener('click', () => {
  const run = Number(button.dataset.toggle), off = !hidden.has(run);
  off ? hidden.add(run) : hidden.delete(run);
  button.setAttribute('aria-pressed', String(!off));
  document.querySelectorAll('[data-run="' + run + '"]').forEach(part => part.classList.toggle('off', off));
}));
start(document);
const replace = (old, made) => {
  const both = (kind, each) => {
    const now = made.querySelectorAll(kind);
    old.querySelectorAll(kind).forEach((was, place) => { if (now[place]) each(was, now[place]); });
  };
  both('details', (was, now) => { now.open = was.open; });
  old.replaceWith(made);
  both('.scroll', (was, now) => now.scrollTo(was.scrollLeft, was.scrollTop));
};
const live = document.getElementById('live');
if (live) {
  const main = document.querySelector('main'), waiting = {};
  const events = new EventSource(document.body.dataset.events);
  events.onerror = () => { live.textContent = 'No connection: this is how it was last. The command may have ended.'; };
  events.onmessage = event => {
    const {blocks, order} = JSON.parse(event.data);
    live.textContent = 'This page is renewed as the run goes on.';
    hide();
    Object.entries(Object.assign(waiting, blocks)).forEach(([name, html]) => {
      const old = document.getElementById(name), holder = document.createElement('template');
      if (old && old.querySelector(':active')) return;  // later: somebody presses something in it
      holder.innerHTML = html;
      const made = holder.content.firstElementChild;
      old ? replace(old, made) : main.append(made);
      start(made);
      delete waiting[name];
    });
    document.title = document.querySelector('h1').textContent;
    [...main.children].filter(part => !order.includes(part.id)).forEach(part => part.remove());
    const wanted = order.map(name => document.getElementById(name)).filter(part => part?.parentNode === main);
    if (wanted.some((part, place) => main.children[place] !== part)) main.append(...wanted);
  };
}
})();
