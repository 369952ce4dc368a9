"""Hugging Face transformers as a server of one pipe, run by an interpreter that has them.

    PEER_PYTHON experiments/peer_program.py MODEL

Reads one JSON object a line, ``{"prompts": [[ids]], "tokens": n}``, generates n tokens a prompt
greedily in one padded batch, f32, on the CPU, and answers with one,
``{"seconds": s, "token_ids": [[ids]]}``. The first line says what answers, or what is wrong.
Imports nothing of this project.
"""

import importlib
import json
import os
import sys
import time


def load(path):
    """The model of a Hugging Face folder or a GGUF file, and what loaded it, in words."""
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, options = path, {}
    if path.endswith(".gguf"):
        folder, options = os.path.dirname(path) or ".", {"gguf_file": os.path.basename(path)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, **options
    )
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return model.eval(), f"{versions}, {torch.get_num_threads()} threads"


def generate(model, prompts, tokens):
    """Seconds of one padded batch, and each prompt's new tokens."""
    torch = importlib.import_module("torch")

    longest = max(map(len, prompts))
    # Padded on the left, so that every prompt's last token is the last.
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - start, out[:, longest:].tolist()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print; answers go through the pipe alone
    try:
        model, versions = load(sys.argv[1])
    except Exception as error:  # whatever it is, the other end says it in one line
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print(json.dumps({"peer": versions}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, token_ids = generate(model, asked["prompts"], asked["tokens"])
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), file=answers, flush=True)


if __name__ == "__main__":
    main()
