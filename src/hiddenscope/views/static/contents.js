/**
 * The contents of a page: a link goes to its part and leaves the address to the views; the part in
 * sight is marked.
 */

/** Where a part counts as being read, from the top of the screen. */
const READ = 0.35;

/**
 * Links go where they say, also once the views have taken their room; the address keeps what the
 * views show.
 */
export function followContents() {
  const links = [
    .../** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll(".contents a")),
  ];
  for (const link of links) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      target(link)?.scrollIntoView();
    });
  }
  if (!links.length) return;
  const linked = links.find((link) => link.hash === location.hash);
  if (linked) target(linked)?.scrollIntoView();
  const mark = () => markCurrent(links);
  addEventListener("scroll", mark, { passive: true });
  mark();
}

/** @param {HTMLAnchorElement} link */
function target(link) {
  return document.getElementById(link.hash.slice(1));
}

/** @param {HTMLAnchorElement[]} links */
function markCurrent(links) {
  const reached = links.filter(
    (link) => (target(link)?.getBoundingClientRect().top ?? Infinity) < READ * innerHeight,
  );
  for (const link of links) {
    if (link === reached.at(-1)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

/**
 * Open the folds around an element.
 * @param {Element} inside
 */
export function opened(inside) {
  for (
    let fold = inside.closest("details");
    fold;
    fold = fold.parentElement?.closest("details") ?? null
  )
    fold.open = true;
}
