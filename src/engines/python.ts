import { dirname, join } from "node:path";
import { OperatorError } from "../protocol/errors.ts";
import type { RankLaunch } from "../protocol/plan.ts";
import { numberIn, wordsOf } from "./args.ts";
import type { AcceleratorQuestion, LaunchInput } from "./engine.ts";

/** What vLLM and SGLang have in common: Python, torch, and caches for what they compile. */

/** What must not reach them from whoever started the agent: other places, other GPUs, another gang, another Python. */
export const PYTHON_SCRUB: readonly string[] = wordsOf(
  "HF_* HUGGING_FACE_* HUGGINGFACE_* TRANSFORMERS_* XDG_* TORCH* TRITON_* FLASHINFER_* RAY_* OMP_*",
  "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES GLOO_* TP_* UCX_* NVSHMEM_* MOONCAKE_*",
  "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE HOST_IP",
  "PYTHON* VIRTUAL_ENV CONDA_* PIP_* UV_* OPENAI_* S3_* AWS_*",
);

/** Environment of a help or version question, and the part of every start that no launch changes. */
export const PYTHON_ENV: Readonly<Record<string, string>> = {
  PYTHONUNBUFFERED: "1",
  PYTHONNOUSERSITE: "1",
  // The weights are on this machine; nothing is to be asked for elsewhere, nor told.
  HF_HUB_OFFLINE: "1",
  TRANSFORMERS_OFFLINE: "1",
  HF_HUB_DISABLE_TELEMETRY: "1",
  DO_NOT_TRACK: "1",
};

/**
 * The environment of one rank: which GPUs, where to compile and keep what was compiled (each package has a variable of its
 * own, and a service has no home), and its own folder's programs first, since what compiles at run time looks for `ninja`.
 */
export function pythonEnv({ launch, program, folder, cache }: LaunchInput): Record<string, string> {
  const at = (name: string) => join(cache, name);
  return {
    ...PYTHON_ENV,
    PATH: `${dirname(program[0])}:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin`,
    CUDA_VISIBLE_DEVICES: launch.gpus.join(","),
    // One thread per GPU's process, or all of them fight for the cores; without GPUs the cores do the work.
    ...(launch.gpus.length > 0 && { OMP_NUM_THREADS: "1" }),
    HOME: cache,
    TMPDIR: join(folder, "tmp"),
    XDG_CACHE_HOME: at("xdg"),
    XDG_CONFIG_HOME: at("config"),
    HF_HOME: at("huggingface"),
    TORCHINDUCTOR_CACHE_DIR: at("inductor"),
    TRITON_CACHE_DIR: at("triton"),
    FLASHINFER_WORKSPACE_BASE: at("flashinfer"),
    CUDA_CACHE_PATH: at("cuda"),
  };
}

/** Asks torch, which both are made of, how many GPUs it sees. @param pythonOf the Python of a program */
export function torchQuestion(pythonOf: (program: string) => string): AcceleratorQuestion {
  return {
    argv: (program) => [pythonOf(program), "-c", "import torch; print('GPUs:', torch.cuda.device_count())"],
    fault: (output) => {
      const count = /^GPUs: (\d+)$/m.exec(output)?.[1];
      if (count === undefined) return `torch does not run: ${output.trim().split("\n").at(-1) ?? ""}`;
      return count === "0" ? "torch sees no GPU" : "";
    },
  };
}

/** Names of the sizes of an engine's layout, in the engine's own words. */
export interface LayoutNames {
  readonly tensor: readonly string[];
  readonly pipeline: readonly string[];
  readonly data: readonly string[];
}

/** Over how many GPUs each layer goes, and over how many groups of layers the model does. */
interface Layout {
  readonly tensor: number;
  readonly pipeline: number;
}

/**
 * How a model is cut over all GPUs of all ranks: as `args` says, and what it leaves open so that every GPU is used.
 * @param usual the tensor size when `args` says nothing
 * @throws OperatorError E_ENGINE when what `args` says cannot use all GPUs
 */
export function layoutOf({ args, gpus, ranks }: RankLaunch, names: LayoutNames, usual: number): Layout {
  const all = Math.max(1, gpus.length) * ranks;
  const data = numberIn(args, names.data) ?? 1;
  const asked = numberIn(args, names.pipeline);
  const tensor = numberIn(args, names.tensor) ?? (asked === null && data === 1 ? usual : all / (data * (asked ?? 1)));
  const pipeline = asked ?? all / (tensor * data);
  if ([tensor, pipeline].every((size) => Number.isInteger(size) && size > 0) && tensor * pipeline * data === all)
    return { tensor, pipeline };
  throw new OperatorError(
    "E_ENGINE",
    "cannot cut the model as args say",
    `${all} GPUs (${ranks} x ${Math.max(1, gpus.length)}) are not tensor ${tensor} x pipeline ${pipeline} x data ${data}`,
    "choose sizes whose product is the number of GPUs, or leave them to llmgw",
  );
}
