// Print how many lines of the scripts named are over 100 columns, and how many conditional
// expressions stand inside another; `--check` says where, and fails if there are any.

import { readFileSync } from "node:fs";
import ts from "typescript";

const check = process.argv.includes("--check");
const [long, nested] = [[], []];

for (const path of process.argv.slice(2).filter((argument) => argument !== "--check")) {
  const text = readFileSync(path, "utf8");
  text.split("\n").forEach((line, i) => line.length > 100 && long.push(`${path}:${i + 1}`));
  const source = ts.createSourceFile(path, text, ts.ScriptTarget.Latest, true);
  const visit = (node, inside) => {
    const conditional = ts.isConditionalExpression(node);
    const { line } = source.getLineAndCharacterOfPosition(node.getStart());
    if (conditional && inside) nested.push(`${path}:${line + 1}`);
    ts.forEachChild(node, (child) => visit(child, inside || conditional));
  };
  visit(source, false);
}

if (!check) console.log(JSON.stringify({ long: long.length, nested: nested.length }));
for (const place of check ? long : []) console.error(`${place}: over 100 columns`);
for (const place of check ? nested : []) console.error(`${place}: a conditional inside another`);
if (check && long.length + nested.length) process.exit(1);
