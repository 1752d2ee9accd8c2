# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that train with Forward(ddp=model), over a network that is slower than backward(), for
common.same() on every rank."""

import contextlib
import functools
import weakref

import torch
import torch.distributed as dist
from await_looks import AFTER, LOOKS, a_thread, zeros_before
from await_network import SLOW, Network, assert_busy, awaited, later, over, slow, training
from common import adamw, assert_same, everything, refused, same, sgd, weights
from ddp_scripts import HOOKS, OPTIONS, SMALL, Net, loss_of, power_sgd, train
from ranks import STEPS, scenario_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import optfuse

SCENARIOS = {}
scenario = functools.partial(scenario_of, SCENARIOS, "forward")


@scenario(
    **{
        f"{name} {make.__name__}": {**option, "make": make}
        for name, option in OPTIONS.items()
        for make in (adamw, sgd)
    }
)
def option(mode, options, make):
    def script(wrap):
        model = Net()
        wrapped = DDP(model, **options)
        yield from training(wrapped, later(wrap, wrapped, make(model.parameters())))

    same(script, mode)


@scenario(**SLOW)
def backward_and_step_do_not_wait(mode, options):
    def iteration(wrapped, optimizer, i):
        loss = train(wrapped, optimizer, i)
        assert_busy(wrapped, i)
        return loss

    same(awaited(iteration, options=options), mode)


@scenario(
    **{h: made for h, made in HOOKS.items() if made["make"] is not power_sgd},
)
def hook(mode, make):
    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        torch.manual_seed(1)
        yield from training(wrapped, later(wrap, wrapped, adamw(model.parameters()), make(model)))

    same(script, mode)


@scenario(**SLOW)
def no_sync(mode, options):
    """Three passes a step, of which the last one reduces."""

    def iteration(wrapped, optimizer, i):
        if i == 0 and options.get("static_graph"):
            train(wrapped, optimizer, 0)
        optimizer.zero_grad()
        for part in range(3):
            with wrapped.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(wrapped, 3 * i + part).backward()
        optimizer.step()
        if i % 4 == 0:
            yield "parameters", dict(wrapped.state_dict())

    same(awaited(iteration, STEPS // 3, options=options), mode)


@scenario(**SLOW)
def accumulation_without_no_sync(mode, options):
    """Every pass reduces, and adds to gradients that are on their way."""

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad(i % 2 == 0)
        loss_of(wrapped, 2 * i).backward()
        loss_of(wrapped, 2 * i + 1).backward()
        optimizer.step()

    same(awaited(iteration, STEPS // 2, options=options), mode)


@scenario(**SLOW)
def several_optimizers(mode, options):
    """Two of one model, one of them stock's; parameters that DDP ignores; frozen ones."""

    def script(wrap):
        model = Net()
        model.alone = nn.Parameter(torch.ones(3))
        model.conv.bias.requires_grad_(False)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["alone"])
        wrapped = DDP(model, **options)
        hook = Network(), over
        optimizers = [
            later(wrap, wrapped, adamw([*model.head.parameters(), model.alone]), hook),
            later(wrap, wrapped, sgd([*model.hidden.parameters(), model.conv.weight]), hook),
            torch.optim.SGD([*model.spare.parameters(), *model.norm.parameters()], lr=1e-2),
        ]
        for i in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(wrapped, i) + (model.alone * (dist.get_rank() + i)).sum()
            loss.backward()
            if i % 3 == 0:
                yield "gradients", [p.grad for p in model.parameters() if p.requires_grad]
            for optimizer in optimizers:
                optimizer.step()
            yield "loss", loss
        yield "parameters", dict(model.state_dict())
        yield "states", [optimizer.state_dict() for optimizer in optimizers]

    same(script, mode)


@scenario()
def gradients_that_no_optimizer_of_ours_has_are_there_after_backward(mode):
    """Nobody else would wait for them: their memory is read past every operator."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL, broadcast_buffers=False)
        own = [p for name, p in model.named_parameters() if "head" in name]
        optimizer = later(wrap, wrapped, adamw(own), (Network(), over))
        for i in range(5):
            optimizer.zero_grad()
            model.zero_grad()
            others = [p for p in model.parameters() if all(p is not q for q in own)]
            loss_of(wrapped, i).backward()
            keys = [torch._C._dispatch_keys(p.grad).raw_repr() for p in others]
            assert len(set(keys)) == 1, "the gradient of another one is marked"
            yield "others", [p.grad for p in others]
            optimizer.step()
        yield "parameters", dict(model.state_dict())

    same(script, mode)


@scenario(
    **{
        f"{look.__name__} {way}": {"look": look, **SLOW[way]}
        for look in LOOKS
        for way in ("copies", "views")
    }
)
def look_before_step(mode, look, options):
    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        assert_busy(wrapped, i)
        yield from look(wrapped.module, optimizer)
        if i != 5:  # a step that is skipped
            optimizer.step()

    prove = look not in (a_thread, zeros_before)  # these leave nothing to defer
    same(awaited(iteration, 8, options=options), mode, prove)


@scenario(
    **{
        f"{look.__name__} {way}": {"look": look, **SLOW[way]}
        for look in AFTER
        for way in ("copies", "views")
    }
)
def look_after_step(mode, look, options):
    def iteration(wrapped, optimizer, i):
        train(wrapped, optimizer, i)
        assert_busy(wrapped, i)
        yield from look(wrapped.module, optimizer)

    same(awaited(iteration, 8, options=options), mode)


@scenario()
def a_gradient_that_is_kept(mode):
    """Beyond zero_grad(), and read when its bucket has been used again."""

    def iteration(wrapped, optimizer, i):
        optimizer.zero_grad()
        loss_of(wrapped, i).backward()
        kept = [p.grad for p in wrapped.parameters()]
        optimizer.zero_grad()
        loss_of(wrapped, i + 10).backward()
        optimizer.step()
        yield "kept", kept

    same(awaited(iteration, 6), mode)


@scenario()
def a_view_that_is_kept(mode):
    """A view of a bucket, which is read past its marks."""

    def script(wrap):
        model = Net()
        wrapped, optimizer, _ = slow(wrap, model, **SLOW["views"]["options"])
        views = []
        for i in range(8):
            optimizer.zero_grad(set_to_none=False)
            loss_of(wrapped, i).backward()
            yield "views", views
            views = [p.grad[:1] for p in model.parameters()]
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario()
def weights_that_a_pass_does_not_use(mode):
    """Their updates wait on, and the next pass must not write to their bucket meanwhile."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
            self.uses_weight = True

        def forward(self, x):
            x = self.a(x)
            return self.b(x) if self.uses_weight else x + self.b.bias + self.b.weight[0]

    def script(wrap):
        model = Halves()
        wrapped, optimizer, _ = slow(wrap, model, make=sgd)
        for i in range(6):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
            wrapped(torch.randn(4, 6, generator=generator)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.a(torch.ones(1, 6))
        yield from everything(model, optimizer)

    same(script, mode)


@scenario()
def unfused_again(mode):
    def script(wrap):
        model = Net()
        wrapped, optimizer, _ = slow(wrap, model, **SLOW["copies"]["options"])
        for i in range(STEPS):
            if i == 5 and wrap.fused:
                optfuse.unfuse(optimizer)
            if i == 10:
                later(wrap, wrapped, optimizer)
            yield "loss", train(wrapped, optimizer, i)
        yield from everything(model, optimizer)

    same(script, mode)


@scenario()
def a_hook_that_is_registered_after_fuse(mode):
    """PyTorch refuses it, and training goes on without."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL, broadcast_buffers=False)
        optimizer = later(wrap, wrapped, adamw(model.parameters()))
        if wrap.fused:
            try:
                wrapped.register_comm_hook(Network(), over)
            except RuntimeError as error:
                assert "only be called once" in str(error), error
            else:
                raise AssertionError("a second hook was taken")
        yield from training(wrapped, optimizer)

    same(script, mode)


@scenario(clip={"options": {"max_grad_norm": 0.1}}, eager={"options": {"eager": True}})
def other_options(mode, options):
    """step() needs the gradients, all of them or one."""

    def script(wrap):
        model = Net()
        wrapped = DDP(model, bucket_cap_mb=SMALL, broadcast_buffers=False)
        optimizer, hook = adamw(model.parameters()), (Network(), over)
        clips = "max_grad_norm" in options
        if wrap.fused:
            more = options if clips else {"eager": [model.head.weight, model.conv.weight]}
            wrap(optimizer, ddp=optfuse.DDPModel(wrapped, hook), **more)
        else:
            wrapped.register_comm_hook(*hook)
        for i in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, i).backward()
            if clips and not wrap.fused:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
            optimizer.step()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario()
def loss_scaling(mode):
    def script(wrap):
        model = Net()
        wrapped, optimizer, _ = slow(wrap, model, **SLOW["copies"]["options"])
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for i in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(wrapped, i)
            if i == 7:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        yield from everything(model, optimizer)

    same(script, mode)


@scenario(
    adafactor={"make": lambda p: torch.optim.Adafactor(p, lr=1e-2)},
    rmsprop={"make": lambda p: torch.optim.RMSprop(p, lr=1e-3)},
)
def other_optimizers(mode, make):
    """Some of them have no kernels, and wait in step()."""

    same(awaited(make=make), mode)


@scenario()
def join(mode):
    """Ranks with fewer batches than others."""

    def script(wrap):
        model = Net()
        model.norm = nn.Identity()  # join() can't keep buffers of ranks that have ended
        wrapped = DDP(model, bucket_cap_mb=SMALL)
        optimizer = later(wrap, wrapped, adamw(model.parameters()))
        for _ in range(2):
            with wrapped.join():
                for i in range(5 + 3 * dist.get_rank()):
                    train(wrapped, optimizer, i)
            yield "parameters", dict(model.state_dict())
        yield "state", optimizer.state_dict()

    same(script, mode)


@scenario()
def a_join_that_divides_by_what_only_ddp_knows(mode):
    model = Net()
    model.norm = nn.Identity()
    wrapped = DDP(model)
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(ddp=wrapped))
    before = weights(model)
    with wrapped.join(divide_by_initial_world_size=False):
        refused(
            lambda: train(wrapped, optimizer, 0),
            "divide_by_initial_world_size=False",
            way_out="without ddp=",
        )
    assert_same("weights after the refusal", weights(model), before)


@scenario()
def optimizers_and_models_that_die(mode):
    """With gradients on their way."""
    for _ in range(3):
        model = Net()
        network = Network(0.05)
        wrapped = DDP(model, broadcast_buffers=False)
        ddp = optfuse.DDPModel(wrapped, (network, over))
        optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(ddp=ddp))
        train(wrapped, optimizer, 0)
        assert network.is_busy()
        before = torch.stack([p.detach().sum() for p in model.parameters()])
        del optimizer
        after = torch.stack([p.detach().sum() for p in model.parameters()])
        assert_same("weights", after, before)
        train(wrapped, torch.optim.SGD(model.parameters(), lr=1e-2), 1)


@scenario()
def a_profiler_that_notes_shapes(mode):
    def iteration(wrapped, optimizer, i):
        profiled = torch.profiler.profile(record_shapes=True)
        with profiled if i in (2, 4) else contextlib.nullcontext():
            train(wrapped, optimizer, i)

    same(awaited(iteration, 6), mode)


@scenario()
def memory_goes_with_zero_grad(mode):
    """Reductions that are on their way do not keep a gradient alive."""
    model = Net()
    network = Network(0.05)
    wrapped = DDP(model, broadcast_buffers=False)
    ddp = optfuse.DDPModel(wrapped, (network, over))
    optimizer = optfuse.fuse(adamw(model.parameters()), optfuse.Forward(ddp=ddp))
    for i in range(3):
        loss_of(wrapped, i).backward()
        assert network.is_busy()
        gone = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad()
        assert all(ref() is None for ref in gone)
