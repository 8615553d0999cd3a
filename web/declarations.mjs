// One file of types for the runtime: what its index exports, and what that needs, without what is internal.
import ts from "typescript";

const host = { getCanonicalFileName: (name) => name, getCurrentDirectory: ts.sys.getCurrentDirectory, getNewLine: () => "\n" };

/** The types of each module, by path; throws where the sources have errors. */
function emitted() {
  const { options, fileNames } = ts.parseJsonConfigFileContent(ts.readConfigFile("tsconfig.json", ts.sys.readFile).config, ts.sys, ".");
  const program = ts.createProgram(fileNames, options);
  const files = new Map();
  const { diagnostics } = program.emit(undefined, (path, text) =>
    files.set(path.replace(/.*\//, "./").replace(".d.ts", ".js"), ts.createSourceFile(path, text, ts.ScriptTarget.Latest, true)));
  const problems = [...ts.getPreEmitDiagnostics(program), ...diagnostics];
  if (problems.length) throw new Error(ts.formatDiagnostics(problems, host));
  return files;
}

const nameOf = (statement) => (statement.name ?? statement.declarationList.declarations[0].name).text;

/** The names of the types that a node refers to. */
function referred(node) {
  const name = ts.isTypeReferenceNode(node) ? node.typeName : ts.isTypeQueryNode(node) ? node.exprName
    : ts.isExpressionWithTypeArguments(node) ? node.expression : null;
  const inner = [];
  node.forEachChild((child) => void inner.push(...referred(child)));
  return name ? [name.getText(), ...inner] : inner;
}

/** The types of what modules of src/ export, by the name that each has when built; all but the first take from it what it exports. */
export function declarations(entries) {
  const files = emitted();
  const all = new Map();
  for (const file of files.values()) {
    for (const statement of file.statements) {
      if (ts.isImportDeclaration(statement) || ts.isExportDeclaration(statement)) continue;
      all.set(nameOf(statement), [...(all.get(nameOf(statement)) ?? []), statement]);
    }
  }
  const first = Object.keys(entries)[0];
  const given = new Set();
  return Object.fromEntries(Object.entries(entries).map(([built, entry]) => {
    const file = files.get(`./${entry}.js`);
    const exported = new Set();
    for (const statement of file.statements) {
      if (!ts.isExportDeclaration(statement)) {
        if (!ts.isImportDeclaration(statement)) exported.add(nameOf(statement));
      } else if (statement.exportClause) statement.exportClause.elements.forEach(({ name }) => exported.add(name.text));
      else for (const each of files.get(statement.moduleSpecifier.text).statements) exported.add(nameOf(each));
    }
    const reached = new Set(exported);
    for (const name of reached) {
      if (given.has(name)) continue;
      const found = all.get(name) ?? [];
      if (found.length > 1) throw new Error(`${found.length} modules declare ${name}; types in one file need one name each`);
      for (const other of found.flatMap(referred)) if (all.has(other)) reached.add(other);
    }
    const taken = [...reached].filter((name) => given.has(name));
    const texts = [...reached].filter((name) => !given.has(name)).map((name) => {
      const [statement] = all.get(name);
      const comment = statement.jsDoc?.at(-1)?.getText();
      const text = statement.getText().replace(/^export /, "").replace(/^declare /, "");
      const word = ts.isInterfaceDeclaration(statement) || ts.isTypeAliasDeclaration(statement) ? "" : "declare ";
      return `${comment ? `${comment}\n` : ""}${exported.has(name) ? "export " : ""}${word}${text}`;
    });
    const about = ts.getLeadingCommentRanges(file.text, 0)?.[0];
    if (built === first) exported.forEach((name) => given.add(name));
    const imports = taken.length ? `import type { ${taken.join(", ")} } from "./${first}.js";\n` : "";
    return [built, `${about ? `${file.text.slice(about.pos, about.end)}\n\n` : ""}${imports}${texts.join("\n")}\nexport {};\n`];
  }));
}
