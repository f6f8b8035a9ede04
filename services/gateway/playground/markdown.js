// Markdown as nodes of the page. They are made one by one: no text of a model is ever parsed as HTML.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import hljs from "./vendor/highlight.min.js";
import { element } from "./element.js";

const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td"]);
const LONGEST_COLOURED = 20_000; // characters: colouring a code block that grows costs its whole length each time
const COPIED_MS = 1500;

const parser = new MarkdownIt({ html: false, linkify: false });
// While a text grows, a line below it would make it a heading for a moment (`lheading`), and a line would vanish (`reference`).
parser.disable(["lheading", "reference"]);
parser.validateLink = (url) => /^(https?:|mailto:)/i.test(url);

// The blocks of a text, in order: tokens, first character, and a fenced block's language, else null.
export function blocks(text) {
  const starts = [0]; // of the lines
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const found = [];
  let depth = 0;
  for (const token of parser.parse(text, {})) {
    if (depth === 0) {
      const [first, end] = token.map;
      const source = text.slice(starts[first], starts[end]); // to the end of the text where no line follows
      found.push({ tokens: [], start: starts[first], source, language: token.type === "fence" ? languageOf(token) : null });
    }
    found.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return found;
}

const languageOf = (fence) => fence.info.trim().split(/\s/)[0];

// The node of a block.
export function nodeOf({ tokens }) {
  const place = document.createDocumentFragment();
  append(tokens, place);
  return place.firstChild;
}

function append(tokens, into) {
  const open = [into];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraphs of a list without gaps
    if (token.type === "inline") append(token.children, open.at(-1));
    else if (token.nesting < 0) open.pop();
    else {
      const node = token.nesting ? container(token) : leaf(token);
      open.at(-1).append(node);
      if (token.nesting) open.push(node);
    }
  }
}

function container(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (token.type === "heading_open") return element(`h${Math.min(6, Number(token.tag[1]) + 2)}`); // below those of the page
  const node = element(TAGS.has(token.tag) ? token.tag : "span");
  if (token.attrGet("start")) node.start = Number(token.attrGet("start"));
  const [, side] = /^text-align:(left|center|right)$/.exec(token.attrGet("style") ?? "") ?? [];
  if (side) node.style.textAlign = side;
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "fence":
      return codeBlock(token.content, languageOf(token));
    case "code_block":
      return codeBlock(token.content, "");
    case "code_inline":
      return element("code", "", token.content);
    case "softbreak": // a model means the end of a line that it writes
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "image": // it would be fetched from elsewhere
      return link(token.attrGet("src"), token.content);
    default:
      return document.createTextNode(token.content);
  }
}

function link(href, text = "") {
  const node = element("a", "", text || "");
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function codeBlock(text, language) {
  const block = element("div", "code-block");
  const bar = element("div", "bar");
  bar.dataset.language = language;
  const button = element("button", "copy");
  button.type = "button";
  button.setAttribute("aria-label", "Copy the code");
  const code = element("code");
  button.addEventListener("click", () => copy(code, button));
  bar.append(button);
  const pre = element("pre");
  pre.append(code);
  block.append(bar, pre);
  setCode(block, text, language);
  return block;
}

// Replaces the text of a code block; the block, its button and its place stay.
export function setCode(block, text, language) {
  const code = block.querySelector("code");
  const shown = text.replace(/\n$/, "");
  code.replaceChildren();
  if (!hljs.getLanguage(language) || shown.length > LONGEST_COLOURED) code.append(shown);
  else colour(hljs.highlight(shown, { language, ignoreIllegals: true })._emitter.rootNode, code);
}

// The pieces of the highlighter's tree: texts, and scopes such as `title.function` with pieces of their own.
function colour(tree, into) {
  for (const piece of tree.children) {
    if (typeof piece === "string") into.append(piece);
    else if (!piece.scope) colour(piece, into);
    else {
      const span = element("span", `hljs-${piece.scope.split(".")[0]}`);
      colour(piece, span);
      into.append(span);
    }
  }
}

async function copy(code, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(code.textContent);
  else {
    // Browsers have a clipboard on https and on this machine only; elsewhere the selection is copied.
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), COPIED_MS);
}
