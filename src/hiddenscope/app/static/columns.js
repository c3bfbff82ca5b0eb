/**
 * Which token of text A, and of text B, each column of a grid stands for: one place for every
 * overlay.
 */

export class Columns {
  /**
   * @param {import("./api.js").ResultAnswer} result
   * @param {number} count how many columns the grid has
   */
  constructor(result, count) {
    /** @type {(number | null)[]} */
    this.tokens = result.columns.length
      ? result.columns.slice(0, count)
      : Array.from({ length: count }, (_, i) => i);
    /** @type {(number | null)[]} */
    this.others = result.other_columns;
  }

  /**
   * The token of text A in a column: null in a gap, undefined where there is no such column.
   * @param {number} column
   */
  tokenAt(column) {
    return this.tokens[column];
  }

  /**
   * The token of text B in a column: null in a gap, undefined where the grid knows nothing of text
   * B.
   * @param {number} column
   */
  otherAt(column) {
    return this.others[column];
  }

  /**
   * The column of a token of text A, or -1.
   * @param {number} token
   */
  columnOf(token) {
    return this.tokens.indexOf(token);
  }
}
