import { useEffect, useState } from "react";
import { type BundleTypes, type Model, type Progress, load } from "torch-webgpu";

export interface Loading<B extends BundleTypes> { model: Model<B> | null; progress: Progress | null; error: Error | null }

const NOTHING = { model: null, progress: null, error: null };

/** The model of a bundle, once it is loaded. It is freed with the component, or when the URL changes. */
export function useModel<B extends BundleTypes = BundleTypes>(url: string): Loading<B> {
  const [state, setState] = useState<Loading<B>>(NOTHING);
  useEffect(() => {
    const ending = new AbortController();
    const { signal } = ending;
    const show = (state: Loading<B>): void => void (signal.aborted || setState(state));
    show(NOTHING);
    const loading = load<B>(url, { signal, progress: (progress) => show({ ...NOTHING, progress }) });
    loading.then((model) => show({ ...NOTHING, model }), (error: Error) => show({ ...NOTHING, error }));
    return () => {
      ending.abort();
      loading.then((model) => model.destroy(), () => undefined);
    };
  }, [url]);
  return state;
}
