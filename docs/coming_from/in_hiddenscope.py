"""Ten tasks in hiddenscope."""

# %% load
import hiddenscope as hs

# Or "gpt2", a folder, a .gguf file, (module, tokenizer).
model = hs.load("./smollm2", dtype="float32")

# %% states
text = "The capital of France is Paris."
states = model.capture(text)
stream = states.select(sites="layer.*").values  # [layer, token, width]
after_norm = states["final"]

# %% ragged
texts = ["Paris.", "The capital of France is Paris.", "It rained all day in Berlin."]
batch = model.capture(texts, "layer.12")
rows = [batch.of(i)["layer.12"] for i in range(len(texts))]

# %% stop
state = model.capture(text, "layer.6")["layer.6"]

# %% lens
prompt = "The capital of France is"
lens = hs.lens(model, prompt, target=" Paris")
words = lens.data["word"].sel(rank=1).isel(token=-1)
probability = lens.data["target_probability"].isel(token=-1)

# %% edit
zeroed = hs.edit(
    model, prompt, {"layer.5": hs.Replace(0.0, tokens=-1)}, sites=(), logits=True
)
logits = zeroed.logits[-1]

# %% patch
contrast = hs.Contrast(prompt, "The capital of Germany is", " Paris", " Berlin")
# layers=0: single tokens alone, and no whole layers beside them.
effect = hs.patch(model, contrast, layers=0).data["effect"]

# %% steer
toward = model.capture("The capital of Germany is", "layer.25")["layer.25"][-1]
away = model.capture(prompt, "layer.25")["layer.25"][-1]
inputs = model.tokenizer(prompt, return_tensors="pt")
with hs.editing(model, {"layer.25": hs.Add(toward - away)}):
    ids = model.module.generate(**inputs, max_new_tokens=8, do_sample=False)
written = model.tokenizer.decode(ids[0])

# %% probe
probe = hs.probe(model, hs.read("cities.csv"), sites="layer.24")
accuracy = probe.facts["best"]["accuracy"]

# %% store
hs.extract(model, "cities.csv", to="states", sites="layer.12")
stored = hs.open("states")["layer.12"][:]

# %% port
import copy

port = copy.deepcopy(model.module)
port.model.layers[7].self_attn.scaling *= 1.01
drift = hs.drift(model, port, texts)
first = drift.facts["first_site"]
culprit = drift.facts["module"]
