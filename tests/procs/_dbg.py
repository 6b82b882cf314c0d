from tests.procs.test_spine_tensor import *
from tests.procs.test_spine import CELLS
def cell(folder, out, data, secs):
    from ds_trainer.trainer import Trainer
    config = cell_config(folder, out, data, "sgd", **secs)
    t = Trainer(config=config, train_dataset=rows(SHAPE["vocab"]), data_collator=collate)
    seen=[]
    layer=t.run.model.model.layers[0]
    def look(where):
        def f(*a):
            seen.append((where, [n for n,p in layer.named_parameters() if p.numel()]))
        return f
    layer.mlp.register_forward_pre_hook(look("mlp pre"))
    layer.mlp.down_proj.register_forward_hook(look("down post"))
    layer.self_attn.register_forward_hook(look("attn post"))
    t.train_step()
    t.train_step()
    return seen[:3]+seen[-3:]
