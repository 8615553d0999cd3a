// The runtime's modules, unminified, with everything that they export.
import { build } from "esbuild";

const { outputFiles } = await build({
  stdin: {
    contents: ["checks", "dtypes", "expressions", "inputs", "layout", "manifest", "plan", "python", "composed-plan", "random", "safetensors", "sized", "tensor"]
      .map((name) => `export * from "./src/${name}.ts";`).join("\n"),
    resolveDir: new URL("..", import.meta.url).pathname,
  },
  bundle: true, format: "esm", write: false,
});
export default await import(`data:text/javascript;base64,${Buffer.from(outputFiles[0].contents).toString("base64")}`);
