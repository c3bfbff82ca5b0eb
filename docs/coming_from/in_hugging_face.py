"""Ten tasks in plain Hugging Face and PyTorch."""

# %% load
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_grad_enabled(False)
tokenizer = AutoTokenizer.from_pretrained("./smollm2")
model = AutoModelForCausalLM.from_pretrained("./smollm2", dtype=torch.float32)

# %% states
text = "The capital of France is Paris."
raw = []
# By default the raw output of the last block is not in the tuple.
hook = model.model.layers[-1].register_forward_hook(
    lambda block, inputs, output: raw.append(output)
)
output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
hook.remove()
stream = torch.stack([*output.hidden_states[:-1], *raw])[:, 0]
after_norm = output.hidden_states[-1][0]

# %% ragged
texts = ["Paris.", "The capital of France is Paris.", "It rained all day in Berlin."]
batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
padded = model(**batch, output_hidden_states=True).hidden_states[12]
masks = batch["attention_mask"].bool()
rows = [states[mask] for states, mask in zip(padded, masks, strict=True)]


# %% stop
class Stop(Exception):
    """Carry a state out of a pass that is not needed any further."""


def stop(block, inputs, output):
    raise Stop(output)


hook = model.model.layers[5].register_forward_hook(stop)
try:
    model(**tokenizer(text, return_tensors="pt"))
except Stop as stopped:
    state = stopped.args[0][0]
finally:
    hook.remove()

# %% lens
prompt = "The capital of France is"
inputs = tokenizer(prompt, return_tensors="pt")
hidden = model(**inputs, output_hidden_states=True).hidden_states
last = torch.stack([state[0, -1] for state in hidden])
# The last entry has been through the norm; a second time would be wrong.
normed = torch.cat([model.model.norm(last[:-1]), last[-1:]])
shares = model.lm_head(normed).softmax(-1)
words = [tokenizer.decode(best) for best in shares.argmax(-1)]
probability = shares[:, tokenizer.encode(" Paris")[0]]


# %% edit
def zero(block, inputs, output):
    output = output.clone()
    output[:, -1] = 0
    return output


hook = model.model.layers[4].register_forward_hook(zero)
logits = model(**inputs).logits[0, -1]
hook.remove()

# %% patch
corrupt = tokenizer("The capital of Germany is", return_tensors="pt")
clean = model(**inputs, output_hidden_states=True)
answer, other = (tokenizer.encode(word)[0] for word in (" Paris", " Berlin"))
depth, tokens = len(model.model.layers), inputs["input_ids"].shape[1]


def difference(logits):
    return logits[:, -1, answer] - logits[:, -1, other]


def patch(layer, token):
    """Make a hook that gives row `layer` of the batch the clean state."""

    def into_block(block, arguments):
        states = arguments[0].clone()
        states[layer, token] = clean.hidden_states[layer][0, token]
        return (states, *arguments[1:])

    return into_block


# One row of the batch for each layer, so that a token takes one pass.
many = {name: values.expand(depth, -1) for name, values in corrupt.items()}
columns = []
for token in range(tokens):
    hooks = [
        block.register_forward_pre_hook(patch(layer, token))
        for layer, block in enumerate(model.model.layers)
    ]
    columns.append(difference(model(**many).logits))
    for hook in hooks:
        hook.remove()
worst, best = difference(model(**corrupt).logits), difference(clean.logits)
effect = (torch.stack(columns, dim=1) - worst) / (best - worst)

# %% steer
toward = model(**corrupt, output_hidden_states=True).hidden_states[25][0, -1]
away = clean.hidden_states[25][0, -1]
hook = model.model.layers[24].register_forward_hook(
    lambda block, inputs, output: output + toward - away
)
ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
hook.remove()
written = tokenizer.decode(ids[0])

# %% probe
import pandas
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

cities = pandas.read_csv("cities.csv")
sentences = list(cities["text"])
batch = tokenizer(sentences, return_tensors="pt", padding=True, padding_side="left")
# `model.model` leaves out the head, whose logits would be large.
hidden = model.model(**batch, output_hidden_states=True).hidden_states
vectors = hidden[24][:, -1].numpy()
probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01))
accuracy = cross_val_score(probe, vectors, cities["label"], cv=5).mean()

# %% store
from safetensors.torch import load_file, save_file

batch = tokenizer(sentences, return_tensors="pt", padding=True, padding_side="right")
hidden = model.model(**batch, output_hidden_states=True).hidden_states
states = hidden[12][batch["attention_mask"].bool()]
save_file({"layer.12": states}, "states.safetensors")
stored = load_file("states.safetensors")["layer.12"]

# %% port
import copy

port = copy.deepcopy(model)
port.model.layers[7].self_attn.scaling *= 1.01
encoded = tokenizer(text, return_tensors="pt")
ours = model(**encoded, output_hidden_states=True).hidden_states
theirs = port(**encoded, output_hidden_states=True).hidden_states
apart = [not torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True)]
first = apart.index(True)
