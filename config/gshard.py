"""The router of GShard (arXiv:2006.16668): two experts per token with renormalized weights, room in each
expert for its balanced share, and what is beyond that dropped in order of position. Other sizes are defaults."""
num_experts = 8
top_k = 2
norm_topk = True
d_expert = 512
capacity_factor = 1.0
drop_policy = "position"
aux_loss_coef = 0.01
