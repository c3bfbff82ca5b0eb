// A page that was opened from disk may not read other files, and Sphinx would read every page it
// finds for its summary.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
