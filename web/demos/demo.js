// What every page does: loads its bundle, says how far it is, what the GPU is, and what to do where it cannot.
import { load, WebGPUUnavailableError } from "./torch-webgpu.js";

export const $ = (selector) => document.querySelector(selector);

const mega = (bytes) => (bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0);

/** The line under the heading, for people who read and for those who listen. */
export function say(text) {
  $("#status").textContent = text;
}

/** What to do about an error. */
function advice(error) {
  if (!(error instanceof WebGPUUnavailableError)) return ["This did not work", error.message];
  const title = "This browser cannot use the GPU yet";
  if (!isSecureContext) {
    return [title, `Browsers give the GPU to pages over https, or from this machine: open http://localhost:${location.port}/ on it.`];
  }
  const where = "The page computes with WebGPU. It is in Chrome and Edge, in Safari from version 26 on, and in Firefox on Windows. " +
    "On Linux, switch on chrome://flags/#enable-unsafe-webgpu.";
  return [title, `${where} What the browser says: ${error.message}`];
}

/** A box above the page, with what went wrong in plain words. */
export function explain(error) {
  console.warn(error);
  const [title, text] = advice(error);
  const box = document.createElement("section");
  box.className = "card problem";
  box.setAttribute("role", "alert");
  box.append(
    Object.assign(document.createElement("h2"), { textContent: title }),
    Object.assign(document.createElement("p"), { textContent: text }),
    Object.assign(document.createElement("button"), { textContent: "Try again", onclick: () => location.reload() }),
  );
  $(".problem")?.remove();
  $("main").prepend(box);
  $("progress")?.remove();
  say("");
}

// Whatever a page does not handle itself, while it is loaded or later.
addEventListener("error", (event) => {
  event.preventDefault();
  explain(event.error ?? new Error(event.message));
});
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  explain(event.reason);
});

/** A file beside the page. */
export async function fetched(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`The server has no ${name} (${response.status}). Build the pages again: scripts/web`);
  return response;
}

export const fetchedJson = async (name) => (await fetched(name)).json();

/** What a browser says of a GPU. */
export function gpuName({ description, vendor, architecture } = {}) {
  return description || [vendor, architecture].filter(Boolean).join(" ") || "a GPU that gives no name";
}

/** The model in the page's folder `bundle`, or a pipeline's, with its progress in the page's bar. */
export async function start(open = load) {
  const bar = $("progress");
  const begun = performance.now();
  const opened = await open(new URL("bundle/", location.href), {
    autoRestore: true,
    onLost: () => say("The GPU was lost; going on with what was saved last."),
    progress({ loadedBytes, totalBytes, pipelines, totalPipelines }) {
      bar.value = 0.9 * (loadedBytes / totalBytes) + 0.1 * (pipelines / Math.max(1, totalPipelines));
      say(loadedBytes < totalBytes
        ? `Loading ${mega(loadedBytes)} of ${mega(totalBytes)} MB`
        : `Preparing the GPU: ${pipelines} of ${totalPipelines}`);
    },
  });
  const model = opened.model ?? opened;
  bar.remove();
  $("#gpu").textContent = `Runs on ${gpuName(model.adapterInfo ?? {})}, with ${mega(model.statistics.gpuBytes)} MB in its memory`;
  say(`Ready after ${((performance.now() - begun) / 1000).toFixed(1)} s`);
  return opened;
}

/** Lets people use the page. */
export function ready() {
  for (const element of document.querySelectorAll(":disabled:not([data-later])")) element.disabled = false;
  document.body.dataset.ready = "true";
}
