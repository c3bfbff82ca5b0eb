// Live views follow the site's button for light and dark. Their frames are sandboxed, so they are
// told by message.
function tellTheme(frame) {
  const theme = document.documentElement.dataset.theme;
  frame.contentWindow.postMessage({ hiddenscope: "theme", theme }, "*");
}
function followTheme() {
  const frames = [...document.querySelectorAll("figure.live iframe")];
  for (const frame of frames) {
    frame.addEventListener("load", () => tellTheme(frame));
    // A frame that was loaded before this script ran has no other chance to hear.
    tellTheme(frame);
  }
  const watcher = new MutationObserver(() => frames.forEach(tellTheme));
  watcher.observe(document.documentElement, { attributeFilter: ["data-theme"] });
}
if (document.readyState === "loading") addEventListener("DOMContentLoaded", followTheme);
else followTheme();
