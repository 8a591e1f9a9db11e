/** Returns controls without a name, images without a text alternative, and duplicate ids. */
const problems = [];
const isShown = (e) => e.checkVisibility({visibilityProperty: true});
for (const e of document.querySelectorAll('button, a[href], input, select, [role=slider]')) {
  if (!isShown(e) || e.closest('[aria-hidden=true]')) continue;
  const name = e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent;
  if (!name) problems.push('no name: ' + e.outerHTML.slice(0, 100));
}
for (const e of document.querySelectorAll('img')) {
  if (!e.hasAttribute('alt')) problems.push('no alt: ' + e.outerHTML.slice(0, 100));
}
const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
ids.filter((id, i) => ids.indexOf(id) !== i).forEach((id) => problems.push('duplicate: ' + id));
for (const e of document.querySelectorAll('[aria-describedby], [aria-labelledby]')) {
  const names = ['aria-describedby', 'aria-labelledby'];
  const ids = names.flatMap((name) => (e.getAttribute(name) ?? '').split(' '));
  for (const id of ids.filter(Boolean)) {
    if (!document.getElementById(id)) problems.push('no element: ' + id);
  }
}
return problems;
