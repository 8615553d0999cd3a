import { type PointerEvent, useState } from "react";
import type { Bundle } from "../public/model/bundle";
import { useModel } from "./useModel";

/** A field that says, for the place of the pointer, whether the model takes it to be in the circle. */
export function Circle() {
  const { model, progress, error } = useModel<Bundle>("model/");
  const [odds, setOdds] = useState<number | null>(null);
  if (error) return <p role="alert">{error.message}</p>;
  if (!model) return <progress max={progress?.totalBytes} value={progress?.loadedBytes} />;
  const ask = async ({ currentTarget, clientX, clientY }: PointerEvent<HTMLElement>) => {
    const { left, top, width, height } = currentTarget.getBoundingClientRect();
    const point = [((clientX - left) / width) * 2 - 1, ((clientY - top) / height) * 2 - 1];
    const { output } = await model.run("forward", { input: [point] });
    setOdds(await output.item());
  };
  return <div onPointerMove={ask} style={{ width: 300, height: 300, border: "1px solid" }}>{odds?.toFixed(3)}</div>;
}
