"""A model that starts in a second, to try things on."""
n_layer = 2
d_model = 64
n_head = 2
num_experts = 4
d_expert = 64
seq_len = 64
global_batch = 8
max_steps = 50
eval_steps = 2
