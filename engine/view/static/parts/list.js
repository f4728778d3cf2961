// Makes a list of any length: only the rows in view are in the document.

import { h } from "view/parts/dom";

const MARGIN = 8; // rows above and below the view that are in the document too, for scrolling

/** Lets the keyboard reach a row, and Enter open it. @param {HTMLElement} row */
function openByEnter(row) {
  row.tabIndex = 0;
  row.addEventListener("keydown", ({ key }) => key === "Enter" && row.click());
}

/**
 * @param {{
 *   id: string,
 *   count: number,
 *   height: number,
 *   view: number,
 *   row: (index: number) => HTMLElement,
 * }} options height: pixels of a row; view: pixels of the list; row: returns an element of class
 * "item"
 */
export function virtualList({ id, count, height, view, row }) {
  const sizer = h("div", { class: "sizer", style: { height: `${count * height}px` } });
  const scroll = h(
    "div",
    { class: "scroll", id, tabindex: "0", role: "list", style: { maxHeight: `${view}px` } },
    sizer,
  );
  /** @type {Map<number, HTMLElement>} */
  const shown = new Map();
  let scheduled = false;
  const show = () => {
    scheduled = false;
    const first = Math.max(0, Math.floor(scroll.scrollTop / height) - MARGIN);
    const end = Math.min(count, Math.ceil((scroll.scrollTop + view) / height) + MARGIN);
    for (const [index, element] of shown) {
      if (index >= first && index < end) continue;
      element.remove();
      shown.delete(index);
    }
    for (let index = first; index < end; index++) {
      if (shown.has(index)) continue;
      const element = row(index);
      element.style.top = `${index * height}px`;
      element.style.height = `${height}px`;
      element.setAttribute("role", "listitem");
      if (element.classList.contains("clickable")) openByEnter(element);
      shown.set(index, element);
      sizer.append(element);
    }
  };
  scroll.addEventListener(
    "scroll",
    () => {
      if (!scheduled) requestAnimationFrame(show);
      scheduled = true;
    },
    { passive: true },
  );
  show();
  return scroll;
}
