// Describe elements, and change a part of the page into a description: what stays the same keeps its focus, its scroll
// position and its open details. Texts only ever become text nodes and attribute values.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "rect", "line", "path", "circle", "text", "title", "desc", "defs", "pattern"]);

// Return a description. `attributes`: by name; `key` marks the same thing among its siblings; `onclick` is a function.
export function el(tag, attributes = {}, ...children) {
  const flat = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return { tag, attributes, children: flat };
}

// Change the children of `node` into those that are described.
export function show(node, children) {
  const old = [...node.childNodes];
  const keyed = new Map(old.filter((child) => child.shownKey !== undefined).map((child) => [child.shownKey, child]));
  const used = new Set();
  let next = node.firstChild;
  for (const child of children.flat(Infinity).filter((part) => part !== null && part !== undefined && part !== false)) {
    const key = child.attributes?.key;
    let found = key === undefined ? firstLike(next, child, used) : keyed.get(String(key));
    if (!found || !isLike(found, child) || used.has(found)) found = created(child);
    used.add(found);
    if (found === next) next = next.nextSibling;
    else node.insertBefore(found, next);
    change(found, child);
  }
  for (const child of old) if (!used.has(child)) child.remove();
}

function firstLike(from, child, used) {
  for (let node = from; node; node = node.nextSibling) {
    if (!used.has(node) && node.shownKey === undefined && isLike(node, child)) return node;
  }
  return null;
}

function isLike(node, child) {
  return child.tag ? node.nodeName.toLowerCase() === child.tag.toLowerCase() : node.nodeType === Node.TEXT_NODE;
}

function created(child) {
  if (!child.tag) return document.createTextNode("");
  return SHAPES.has(child.tag) ? document.createElementNS(SVG, child.tag) : document.createElement(child.tag);
}

function change(node, child) {
  if (!child.tag) {
    if (node.data !== String(child)) node.data = String(child);
    return;
  }
  const { key, onclick, onchange, ...attributes } = child.attributes;
  if (key !== undefined) node.shownKey = String(key);
  node.onclick = onclick ?? null;
  node.onchange = onchange ?? null;
  const wanted = new Map(Object.entries(attributes).filter(([, value]) => value !== null && value !== undefined));
  for (const name of node.getAttributeNames()) {
    const person = name === "open" && node.nodeName === "DETAILS"; // the reader opens and closes it
    if (!wanted.has(name) && !person) node.removeAttribute(name);
  }
  for (const [name, value] of wanted) {
    if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
  }
  show(node, child.children);
}
