// The words of an answer, which grow: plain, or as Markdown. A seam is where another worker went on.

import { element } from "./element.js";
import { blocks, nodeOf, setCode } from "./markdown.js";

function seamNode(title) {
  const seam = element("span", "seam");
  seam.title = title;
  return seam;
}

// Words as they are, after the text that they continue.
export class PlainWords {
  constructor({ given = "", code = false }) {
    this.node = element("div", code ? "words code" : "words");
    if (given) this.node.append(element("span", "given", given));
    this.#continue();
  }

  write(text) {
    this.node.lastChild.firstChild.appendData(text);
  }

  seam(title) {
    this.node.append(seamNode(title));
    this.#continue();
  }

  finish() {}

  #continue() {
    const told = element("span", "told");
    told.append(document.createTextNode(""));
    this.node.append(told);
  }
}

// Words as Markdown. A block that stays as it is keeps its node, and with it what a reader has selected or scrolled to.
export class MarkdownWords {
  #text = "";
  #seams = []; // {at, title}
  #shown = []; // blocks with their nodes
  #frame = 0;
  #draw;

  // `draw` makes a change of the page.
  constructor(draw) {
    this.#draw = draw;
    this.node = element("div", "words markdown told");
  }

  write(text) {
    this.#text += text;
    this.#frame ||= requestAnimationFrame(() => this.finish());
  }

  seam(title) {
    this.#seams.push({ at: this.#text.length, title });
  }

  // Shows all that is written.
  finish() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#draw(() => this.#show());
  }

  #show() {
    const found = blocks(this.#text);
    found.forEach((block, index) => {
      const end = found[index + 1]?.start ?? Infinity;
      block.seams = this.#seams.filter(({ at }) => at > 0 && at >= block.start && at < end);
      block.node = this.#place(block, this.#shown[index]);
    });
    for (const { node } of this.#shown.slice(found.length)) node.remove();
    this.#shown = found;
  }

  #place(block, old) {
    const same = old && old.seams.length === block.seams.length;
    if (same && old.source === block.source && old.language === block.language) return old.node;
    if (same && !block.seams.length && block.language !== null && old.language === block.language) {
      setCode(old.node, block.tokens[0].content, block.language);
      return old.node;
    }
    const node = nodeOf(block);
    for (const seam of block.seams) putSeam(node, block, seam);
    if (old) old.node.replaceWith(node);
    else this.node.append(node);
    return node;
  }
}

// The seam is in the source; what the source shows up to there has as many characters on the page.
function putSeam(node, { source, start }, { at, title }) {
  const [before] = blocks(source.slice(0, at - start));
  let left = before ? nodeOf(before).textContent.length : 0;
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { length } = texts.currentNode;
    if (left <= length) {
      texts.currentNode.splitText(left).before(seamNode(title));
      return;
    }
    left -= length;
  }
  node.append(seamNode(title));
}
