"""The router of the Switch Transformer (arXiv:2101.03961): one expert per token, chosen by softmax, and a capacity
beyond which tokens are dropped in order of position. Model sizes are the defaults."""
num_experts = 8
top_k = 1
norm_topk = False
d_expert = 1024
capacity_factor = 1.25
drop_policy = "position"
aux_loss_coef = 0.01
