"""Ten tasks in TransformerLens."""

# %% load
import torch
from transformer_lens.model_bridge import TransformerBridge

torch.set_grad_enabled(False)
model = TransformerBridge.boot_transformers("./smollm2", device="cpu")
# Otherwise every text begins with a token that Hugging Face does not add.
model.cfg.default_prepend_bos = False

# %% states
text = "The capital of France is Paris."
_, cache = model.run_with_cache(text)
stream = cache.accumulated_resid()[:, 0]  # [layer, token, width]
after_norm = model.ln_final(stream[-1:])[0]

# %% ragged
texts = ["Paris.", "The capital of France is Paris.", "It rained all day in Berlin."]
_, cache = model.run_with_cache(
    texts, padding_side="right", names_filter="blocks.11.hook_resid_post"
)
lengths = [model.to_tokens(sentence).shape[1] for sentence in texts]
padded = cache["resid_post", 11]
rows = [states[:length] for states, length in zip(padded, lengths, strict=True)]

# %% stop
state = model(text, stop_at_layer=6)[0]

# %% lens
from transformer_lens.tools.analysis import logit_lens

prompt = "The capital of France is"
lens = logit_lens(model, prompt, targets=" Paris", return_type="probs")
probability = lens.values[:, 0, 0]
best = logit_lens(model, prompt, top_k=1)
words = [word for ((word,),) in best.readout.decode(model.tokenizer)]


# %% edit
def zero(state, hook):
    state[:, -1] = 0
    return state


hooks = [("blocks.4.hook_resid_post", zero)]
logits = model.run_with_hooks(prompt, fwd_hooks=hooks)[0, -1]

# %% patch
from transformer_lens import patching

corrupt = model.to_tokens("The capital of Germany is")
clean_logits, clean_cache = model.run_with_cache(prompt)
answer, other = model.to_single_token(" Paris"), model.to_single_token(" Berlin")


def difference(logits):
    return logits[0, -1, answer] - logits[0, -1, other]


worst, best = difference(model(corrupt)), difference(clean_logits)
effect = patching.get_act_patch_resid_pre(
    model,
    corrupt,
    clean_cache,
    lambda logits: (difference(logits) - worst) / (best - worst),
)

# %% steer
_, other_cache = model.run_with_cache(corrupt)
direction = other_cache["resid_post", 24][0, -1] - clean_cache["resid_post", 24][0, -1]
hooks = [("blocks.24.hook_resid_post", lambda state, hook: state + direction)]
with model.hooks(fwd_hooks=hooks):
    written = model.generate(prompt, max_new_tokens=8, do_sample=False)

# %% probe
import pandas
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

cities = pandas.read_csv("cities.csv")
vectors = model(list(cities["text"]), padding_side="left", stop_at_layer=24)[:, -1]
probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01))
accuracy = cross_val_score(probe, vectors.numpy(), cities["label"], cv=5).mean()

# %% store
from safetensors.torch import load_file, save_file

sentences = list(cities["text"])
padded = model(sentences, padding_side="right", stop_at_layer=12)
lengths = [model.to_tokens(sentence).shape[1] for sentence in sentences]
states = [rows[:length] for rows, length in zip(padded, lengths, strict=True)]
save_file({"layer.12": torch.cat(states)}, "states.safetensors")
stored = load_file("states.safetensors")["layer.12"]

# %% port
import copy

port = copy.deepcopy(model)
port.original_model.model.layers[7].self_attn.scaling *= 1.01
_, ours = model.run_with_cache(text)
_, theirs = port.run_with_cache(text)
apart = [
    not torch.allclose(a, b)
    for a, b in zip(ours.accumulated_resid(), theirs.accumulated_resid(), strict=True)
]
first = apart.index(True)
