// The catalogue's filters. What is asked for stands in the address too, so that it can be sent to somebody.
const form = document.getElementById("find");
const rows = [...document.querySelectorAll("#catalogue tbody tr")];
const said = document.getElementById("found");

// Of a pasted error, what is no word counts neither here nor there: quotes, numbers of ranks, punctuation.
const words = (text) => new Set(text.toLowerCase().match(/[a-z_][a-z0-9_]{2,}/g) ?? []);
const known = new Map(rows.map((row) => [row, words(row.dataset.text)]));
// A word counts the more, the fewer bugs have it.
const weight = (word) => Math.log((rows.length + 1) / (1 + rows.filter((row) => known.get(row).has(word)).length));
const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);

function show() {
  const asked = Object.fromEntries(new FormData(form));
  const weights = new Map([...words(asked.words)].map((word) => [word, weight(word)]));
  const whole = sum([...weights.values()]);
  const share = (row) => sum([...weights].filter(([word]) => known.get(row).has(word)).map(([, one]) => one)) / whole;
  const candidates = rows.filter((row) =>
    (!asked.framework || row.dataset.framework === asked.framework) &&
    (!asked.side || row.dataset.side === asked.side) &&
    (!asked.release.trim() || row.dataset.releases.split(" ").includes(asked.release.trim())));
  const best = Math.max(0, ...candidates.map(share));
  // Much of what is pasted is in no page. A bug that has a third of it is worth a look; others are not.
  const shown = candidates.filter((row) => !whole || (best > 1 / 3 && share(row) > best - 1e-9));
  rows.forEach((row) => { row.hidden = !shown.includes(row); });
  const closest = whole && shown.length && best < 0.999 ? `, with ${Math.round(100 * best)} % of these words` : "";
  said.textContent = `${shown.length} of ${rows.length} bugs${closest}`;
  const kept = Object.entries(asked).filter(([, value]) => value);
  history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.pathname);
}

for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (form.elements[name]) form.elements[name].value = value;
}
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
show();
