# SPDX-License-Identifier: BSD-3-Clause
"""Cases beyond the recipes, with Accelerate's and Lightning's wrappers around an optimizer.
`python wrappers.py NAME`: a process for each framework."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import optfuse

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
STEPS = 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=generator)
    return x, torch.randint(3, (16,), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def result(model, optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for p in params for value in optimizer.state[p].values()]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *state]]


def check(stock, fused, what):
    assert len(stock) == len(fused), f"{what}: {len(fused)} tensors, not {len(stock)}"
    assert all(map(torch.equal, stock, fused)), f"{what}: other bits"


def fails(function, *words):
    try:
        function()
    except optfuse.Error as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("it does not raise")


def accelerate():
    """AcceleratedOptimizer, whose step() under a GradScaler is one that it has kept."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)

    def train(wrap, scaled):
        model = net()
        inner = adamw(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
        wrapper = AcceleratedOptimizer(inner, scaler=scaler)
        assert wrap(wrapper) is wrapper
        for i in range(STEPS):
            x, y = batch(i)
            loss = cross_entropy(model(x), y)
            (scaler.scale(loss) if scaled else loss).backward()
            if scaled:
                scaler.unscale_(inner)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            wrapper.step()
            assert not wrapper.step_was_skipped
            schedule.step()
            wrapper.zero_grad()
        return model, wrapper

    for scaled in (False, True):
        stock = result(*train(lambda wrapper: wrapper, scaled))
        model, wrapper = train(optfuse.fuse, scaled)
        created = optfuse.summary(wrapper).created
        assert created == STEPS * 4, created  # and not by the step() that it had before
        check(stock, result(model, wrapper), f"scaled={scaled}")
        check(stock, result(model, copy.deepcopy(wrapper)), "a copy")
        optfuse.flush(wrapper)
        assert optfuse.unfuse(wrapper) is wrapper
        assert type(wrapper.optimizer) is torch.optim.AdamW
    stock = result(*train(lambda wrapper: wrapper, False))
    fused = train(lambda wrapper: optfuse.fuse(optimizer=wrapper, mode="backward"), False)
    check(stock, result(*fused), "backward mode")
    fails(lambda: optfuse.fuse(fused[1]), "already fused")
    fails(lambda: train(lambda wrapper: optfuse.fuse(wrapper, mode="backward"), True), "scal")
    patched_wrapper()


def sign_of_gradient(self, p, group, i):
    p.data.add_(p.grad.sign(), alpha=-group["lr"])


def patched_wrapper():
    """Trainers put methods into Accelerate's wrapper, and call them in hooks."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)

    def train(wrap, hooked):
        model = net()
        wrapper = AcceleratedOptimizer(adamw(model))
        wrapper.step_parameter = sign_of_gradient.__get__(wrapper)
        wrapper.step = lambda: None
        assert wrap(wrapper) is wrapper
        group = wrapper.param_groups[0]

        def hook(p):
            wrapper.step_parameter(p, group, 0)
            p.grad = None

        for p in model.parameters() if hooked else ():
            p.register_post_accumulate_grad_hook(hook)
        for i in range(STEPS):
            cross_entropy(model(batch(i)[0]), batch(i)[1]).backward()
        return model, wrapper

    stock = result(*train(lambda wrapper: wrapper, True))
    for mode in ("forward", "backward", optfuse.Backward(final=True)):
        model, wrapper = train(lambda wrapper, mode=mode: optfuse.fuse(wrapper, mode), True)
        check(stock, result(model, wrapper), f"hooks, {mode}")
        optfuse.unfuse(wrapper)
        assert wrapper.step_parameter.__self__ is wrapper and "step" in vars(wrapper)
        assert "step_parameter" not in vars(wrapper.optimizer)
    final = optfuse.Backward(final=True)
    fused = train(lambda wrapper: optfuse.fuse(wrapper, final), False)
    check(stock, result(*fused), "in the place of the hooks")


def lightning():
    """LightningOptimizer, a subclass of the class of the optimizer that it holds."""
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule, Trainer

    from optfuse.integrations.lightning import OptfuseCallback

    class Manual(LightningModule):
        automatic_optimization = False

        def __init__(self, fuse):
            super().__init__()
            self.net, self.fuse = net(), fuse

        def configure_optimizers(self):
            return self.fuse(adamw(self.net))

        def training_step(self, item, index):
            x, y = item
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(cross_entropy(self.net(x), y))
            optimizer.step()
            self.looked = optimizer.state_dict(), len(optimizer.state)

    class Automatic(Manual):
        automatic_optimization = True

        def training_step(self, item, index):
            x, y = item
            return cross_entropy(self.net(x), y)

    def train(kind, fuse, *callbacks, **options):
        module = kind(fuse)
        with tempfile.TemporaryDirectory() as directory:
            trainer = Trainer(
                accelerator="cpu",
                max_epochs=1,
                callbacks=list(callbacks),
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=directory,
                **options,
            )
            batches = [batch(i) for i in range(STEPS)]
            trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        return trainer, module

    def trained(trainer, module):
        return result(module.net, trainer.optimizers[0])

    def leave(optimizer):
        return optimizer

    for kind in (Manual, Automatic):
        stock = trained(*train(kind, leave))
        for mode in ("forward", "backward"):
            by_line = train(kind, lambda made, mode=mode: optfuse.fuse(made, mode=mode))
            by_callback = train(kind, leave, OptfuseCallback(mode=mode))
            for trainer, module in (by_line, by_callback):
                wrapper = trainer.strategy._lightning_optimizers[0]
                found = optfuse.summary(wrapper)
                assert (found.mode, found.created) == (mode, STEPS * 4), str(found)
                assert type(trainer.optimizers[0]) in type(wrapper).__mro__
                check(stock, trained(trainer, module), f"{kind.__name__}, {mode}")
                optfuse.flush(wrapper)
    clipping = {"gradient_clip_val": 0.1}
    fails(lambda: train(Automatic, leave, OptfuseCallback(mode="backward"), **clipping), "Clipping")
    fails(lambda: train(Automatic, leave, OptfuseCallback(mode="forwards")), "mode")

    trainer, module = train(Manual, leave)
    wrapper = trainer.strategy._lightning_optimizers[0]
    assert optfuse.fuse(wrapper, mode="backward") is wrapper
    cross_entropy(module.net(batch(0)[0]), batch(0)[1]).backward()
    fails(wrapper.zero_grad, "zero_grad() before step()")
    wrapper._optimizer.step()
    optfuse.unfuse(wrapper)
    assert type(wrapper._optimizer) is torch.optim.AdamW

    def with_fabric(fuse):
        fabric = Fabric(accelerator="cpu", devices=1)
        model = net()
        model, optimizer = fabric.setup(model, adamw(model))
        optimizer = fuse(optimizer)
        for i in range(STEPS):
            x, y = batch(i)
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(x), y))
            optimizer.step()
        return model, optimizer

    stock = result(*with_fabric(leave))
    for mode in ("forward", "backward"):
        fused = with_fabric(lambda made, mode=mode: optfuse.fuse(made, mode=mode))
        assert optfuse.summary(fused[1]).created == STEPS * 4
        check(stock, result(*fused), f"Fabric, {mode}")


def transformers():
    from optfuse.integrations.transformers import OptfuseCallback

    fails(lambda: OptfuseCallback(mode="backward"), "norm of all gradients", "forward")


if __name__ == "__main__":
    {"accelerate": accelerate, "lightning": lightning, "transformers": transformers}[sys.argv[1]]()
    print("as stock")
