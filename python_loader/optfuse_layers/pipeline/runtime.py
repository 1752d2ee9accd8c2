# SPDX-License-Identifier: BSD-3-Clause
"""Runs the plan of a layer pipeline on the processes of torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from optfuse._arguments.check import argument, shown
from optfuse._library.bindings import Error
from optfuse._patches.listed import PIPELINES
from optfuse._patches.replacing import warn_of_changes
from optfuse_layers.pipeline import tasks
from optfuse_layers.pipeline.arguments import KINDS
from optfuse_layers.pipeline.flow import PARTS, Flow, Key, behind, ordered
from optfuse_layers.pipeline.forwarding import Forwarding
from optfuse_layers.pipeline.plan import FORWARDING, SYNCHRONOUS, PipelinePlan, Task
from optfuse_layers.pipeline.refusals import (
    check_divided,
    check_module,
    check_optimizer,
    check_processes,
    check_run,
    check_shared,
)
from optfuse_layers.pipeline.shapes import Spec, infer, spec_of
from optfuse_layers.pipeline.shared_weights import Shared, edges_of, ties_of
from optfuse_layers.pipeline.transport import Transport
from optfuse_layers.pipeline.updates import Updates, updates_of
from optfuse_layers.pipeline.versions import Weights

LossFunction = Callable[[Tensor, Any], Tensor]


class Pipeline:
    """Trains a model by a plan, on as many processes as the plan has.

        plan = optfuse.pipeline.plan(model, example, processes=2, strategy="1f1b")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipeline = optfuse.pipeline.Pipeline(plan, model, loss_fn, optimizer)
        losses = pipeline.run(inputs, targets)  # lists of batches
        pipeline.drain()

    Every process makes it, with the same arguments, and calls the same methods.

    plan: the same on all processes; broadcast PipelinePlan.state() from the one that has measured.
    module: an nn.Sequential whose entries are the layers of the plan. A process trains its layers
    in place, and changes nothing of the others, which may be on the meta device. Layers with
    replicas get the weights of the first.
    loss_fn: called as loss_fn(output, target) for each batch, by the process of the last layer;
    returns a tensor with one element.
    optimizer: any optimizer of torch.optim, stock or fused by optfuse, over module.parameters(), or
    at least those of the layers of this process. The update of a layer is its step(), with
    gradients of only that layer's parameters. A fused one has one step() for all layers in plans
    without delays: in backward mode, which needs such a plan, each layer is updated before, in
    forward mode in its next forward pass.
    weights: what dX of a layer sees, as delayed training has several versions. "stash": those of
    its batch's forward. "latest": instead of weights of Linear and Conv2d, the newest ones that
    the plan puts before this dX. "average": the forward's, reconstructed from the newest and a
    moving average of their changes (_layers/delay/average.py). Everything else in backward is the
    forward's in any case.
    losses: "sum": gradients of batches that share an update are summed, as by several backward()
    calls. "mean": the loss of each is multiplied with its share of their rows (of the first
    dimension of the inputs) before, so that a loss_fn that takes a mean over rows has the mean over
    all of them. run() returns the losses as they are in any case.
    shared: how gradients of a weight that two layers share are added up, in plans without delays.
    "sums": each layer adds up those of its micro-batches, then both are added. "each": those of
    each micro-batch first, which has the bits of one process and takes a message for each.
    process_group: of torch.distributed; None: the default one. A plan of one process needs none.

    Delays: the forward of batch b in layer l sees the updates of the batches before b - D(l), D
    being plan.delays. With D > 0 this is another algorithm than training without a pipeline."""

    def __init__(
        self,
        plan: PipelinePlan,
        module: nn.Sequential,
        loss_fn: LossFunction,
        optimizer: Optimizer,
        *,
        weights: str = "stash",
        losses: str = "sum",
        shared: str = "sums",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        given = locals()
        for name, kind in KINDS.items():
            argument("Pipeline", name, given[name], kind)
        warn_of_changes(PIPELINES)
        check_module(plan, module)
        self._group = check_processes(plan, process_group)
        self.plan, self.weights, self.losses = plan, weights, losses
        self._shared_mode = shared
        self._module, self._loss_fn, self._optimizer = module, loss_fn, optimizer
        self._process = dist.get_rank(self._group) if self._group else 0
        late = behind(plan)  # which finds out whether the plan can end, too
        self._flow = Flow(plan, None if weights == "stash" else late)
        self._layers = [n for n in range(self._flow.n) if self._flow.is_on(n, self._process)]
        check_divided(self._flow, module)
        check_optimizer(plan, module, self._layers, optimizer)
        check_shared(plan, module, shared, self._group)
        self._device = _device(module, self._layers)
        self._weights = {n: self._weights_of(n, late) for n in self._layers if self._is_trained(n)}
        self._shared = Shared(plan, ties_of(module), self._process, shared)
        self._updates = self._updates_of(optimizer)
        self._batches = 0  # that have been run
        self._drained = 0  # those of them before the last drain()
        self._broken: str | None = None  # why; no exception, which would keep its batch
        self._shapes: dict[Spec, list[Spec]] = {}
        self._transport = self._connect() if self._group else None
        if self._transport is not None:
            self._share_replicas()

    # Methods for users

    def run(self, inputs: Iterable[Tensor] | None, targets: Iterable[Any] | None) -> list[float]:
        """Trains on some batches, and returns their losses, on every process.

        inputs: a tensor for each batch; targets: what loss_fn gets for each. All processes may
        pass both; the inputs are used by the process of the first layer, the targets by that of
        the last one, and the others may pass None.

        Where several batches share an update, the last of a run may be fewer: they have an update
        of their own, and the next run begins with a new group.

        When it returns, all updates of these batches have been made, and each layer has kept the
        D(l) versions that the next forwards are to see: run(a) and then run(b) have the bits of
        run(a + b), if the groups of a are complete. The pipeline fills and empties once a call, so
        pass many batches at a time.

        Raises optfuse.Error on all processes if the arguments don't fit, which changes nothing. A
        process on which anything else raises, or that ends, ends the pipeline: the others get an
        optfuse.Error that names it, at once or when they next wait for others. Then all start again
        from a checkpoint."""
        self._check_sound()
        with self._all_or_none():
            xs = None if inputs is None else list(inputs)
            ys = None if targets is None else list(targets)
            told = self._gather(self._arguments(xs, ys), "at the beginning of run()")
        shapes = check_run(self._flow, told)  # which all refuse, or none
        with self._all_or_none():
            losses = _Call(self, shapes, xs or [], ys or []).play()
            told = self._gather(losses, "at the end of run()")
        joined = {b: loss for one in told for b, loss in one.items()}
        return [joined[b] for b in sorted(joined)]

    def drain(self) -> None:
        """From now on each layer sees all updates so far, as at the beginning: the versions that
        the next forwards were to see are dropped. Their memory is freed."""
        self._check_sound()
        self._drained = self._batches
        for weights in self._weights.values():
            weights.drain()

    @property
    def stash_bytes(self) -> int:
        """Bytes of the earlier weights that this process holds while the pipeline is full: D(l)
        times the parameters of each layer. weights="latest" does without those of Linear and
        Conv2d, "average" has one average of each instead. Between two calls of run(), D(l)
        versions are there whatever the weights, until drain()."""
        return sum(weights.stash_bytes() for weights in self._weights.values())

    def state_dict(self) -> dict[str, Any]:
        """All that training goes on from: of this process's layers the parameters and buffers
        ("module", with the names in the whole module, so that those of all processes make one
        state dict of the model), the optimizer's state, and the versions that the next forwards
        will see. Tensors of the module and of the optimizer are the real ones, as in
        Module.state_dict(): save them before the next run()."""
        self._check_sound()
        return {
            "plan": self.plan.state(),
            "process": self._process,
            "weights": self.weights,
            "batches": self._batches,
            "drained": self._drained,
            "module": {name: t.detach() for name, t in self._tensors().items()},
            "versions": {n: weights.state() for n, weights in self._weights.items()},
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state_dict() of the same process of a pipeline with the same plan and weights,
        drained or not. Raises optfuse.Error for another one's, and has then changed nothing."""
        self._check_sound()
        tensors = self._tensors()
        expected = {"plan": self.plan.state(), "process": self._process, "weights": self.weights}
        for name, value in expected.items():
            if state.get(name) != value:
                raise Error(
                    f"optfuse: this state of a Pipeline is of another {name}: it has "
                    f"{_short(state.get(name))}, here is {_short(value)}; each process loads what "
                    "it has saved, into a Pipeline of the same plan"
                )
        if set(state["module"]) != set(tensors):
            differing = sorted(set(state["module"]) ^ set(tensors))
            raise Error(
                f"optfuse: this state of a Pipeline is of another module: {differing[0]!r} is "
                "only in one of them"
            )
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state["module"][name])
        for n, weights in self._weights.items():
            weights.load(state["versions"][n])
        self._batches, self._drained = state["batches"], state["drained"]

    # Inside

    def _updates_of(self, optimizer: Optimizer) -> Updates:
        is_synchronous = self.plan.strategy in SYNCHRONOUS
        complete = self._complete_shared if self._shared else None
        return updates_of(optimizer, len(self._weights), is_synchronous, complete)

    def _complete_shared(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return self._shared.complete(self._transport)

    def _connect(self) -> Transport:
        assert self._group is not None
        batches = self._flow.multiple * (max(self.plan.delays) + 2)
        edges = ordered(self._flow, batches).edges()
        watches = self.plan.strategy in FORWARDING
        tied = edges_of(self.plan, ties_of(self._module))
        return Transport(edges, self._group, self._device, watches, tied)

    def _is_trained(self, layer: int) -> bool:
        return self._flow.has("update", layer)

    def _weights_of(self, layer: int, late: dict[tuple[int, int], int]) -> Weights:
        delay = self.plan.delays[layer]
        parts = self._flow.parts(layer) or [0]
        seen = [delay if self.weights == "stash" else late[layer, part] for part in parts]
        return Weights(self._module[layer], delay, seen, self.weights)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's layers, by their names in the module."""
        return {
            f"{n}.{name}": tensor
            for n in self._layers
            for name, tensor in self._module[n].state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }

    def _share_replicas(self) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        for n, place in enumerate(self.plan.places):
            if place.replicas == 1:
                continue
            for parameter in self._module[n].parameters():
                is_here = n in self._layers
                shared = (
                    parameter.detach()
                    if is_here
                    else torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
                )
                dist.broadcast(shared, ranks[place.forward], self._group)

    def _check_sound(self) -> None:
        if self._broken is not None:
            raise Error(
                f"optfuse: this Pipeline has failed ({self._broken}), and may be in the "
                "middle of a batch: make it again on all processes, and load a checkpoint of it"
            )

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """An exception in here ends the pipeline, on all processes."""
        try:
            yield
        except BaseException as error:
            self._broken = _short(error)
            if self._transport is not None:
                self._transport.fail(error)
            raise

    def _gather(self, told: Any, doing: str) -> list[Any]:
        return self._transport.gather(told, doing) if self._transport else [told]

    def _arguments(self, inputs: list[Any] | None, targets: list[Any] | None) -> dict[str, Any]:
        """This process's report for check_run()."""
        told: dict[str, Any] = {
            "process": self._process,
            "state": self._state_of_run(),
            "inputs": None if inputs is None else len(inputs),
            "targets": None if targets is None else len(targets),
        }
        if inputs is not None and 0 in self._layers:
            told["inputs"] = [self._shapes_of(b, x) for b, x in enumerate(inputs)]
        return told

    def _state_of_run(self) -> dict[str, Any]:
        """The values that must be the same on all processes."""
        return {
            "batches run before": self._batches,
            "batches before drain()": self._drained,
            "weights": self.weights,
            "losses": self.losses,
            "shared": self._shared_mode,
            "plan": self.plan.state(),
        }

    def _shapes_of(self, batch: int, x: Any) -> list[Spec] | str:
        """Shapes of the tensors that go from layer to layer, or why they can't be known."""
        if not isinstance(x, Tensor):
            return (
                f"optfuse: run() got {shown(x)} as the input of batch {batch}; give a tensor each"
            )
        first = spec_of(x)
        if first not in self._shapes:
            try:
                self._shapes[first] = infer(self._module, first)
            except Error as error:
                return str(error)
        return self._shapes[first]


class _Call:
    """One call of run(). Batches are counted from its first one here, groups in _group() from the
    first that the pipeline has ever run."""

    def __init__(
        self,
        pipeline: Pipeline,
        shapes: list[list[Spec]],
        inputs: list[Tensor],
        targets: list[Any],
    ) -> None:
        """shapes: of each batch, what infer() says."""
        self._pipeline = pipeline
        self._flow, self._process = pipeline._flow, pipeline._process
        self._module, self._transport = pipeline._module, pipeline._transport
        self._shapes = shapes
        self._batches = len(shapes)
        self._order = ordered(pipeline._flow, self._batches)
        self._inputs, self._targets = inputs, targets
        self._values: dict[Key, tuple[list[Any], int]] = {}  # with the uses that are left
        self._graphs: dict[tuple[int, int], tasks.Graph] = {}
        self._sums: dict[int, tasks.Gradients] = {}  # of groups of micro-batches
        self._groups = {n: weights.updates for n, weights in pipeline._weights.items()}  # before
        self._losses: dict[int, Tensor] = {}
        self._doing = ""

    def play(self) -> dict[int, float]:
        """The losses that this process knows, by batches."""
        pipeline = self._pipeline
        for parameter in pipeline._module.parameters():
            parameter.grad = None
        for source, edge in (self._transport.sources if self._transport else {}).items():
            edge.expect(self._order.sent(source, self._process), self._specs)
        mine = list(self._order.tasks[self._process])
        if pipeline.plan.strategy in FORWARDING:
            is_kept = self._values.__contains__
            of = self._flow, self._process, mine, self._transport, pipeline._updates.waits
            Forwarding(*of, is_kept, self._do).play()
        else:
            for task in mine:
                self._do(task)
        pipeline._batches += self._batches
        return {b: float(loss) for b, loss in self._losses.items()}

    def _do(self, task: Task) -> None:
        kind = task.kind.replace("_", " ")
        self._doing = f"in the {kind} of layer {task.layer}, batch {task.batch}"
        do = {
            "forward": self._forward,
            "input_gradient": self._input_gradient,
            "second_input_gradient": self._input_gradient,
            "weight_gradient": self._weight_gradient,
            "update": self._update,
        }
        do[task.kind](task)

    # Tasks

    def _forward(self, task: Task) -> None:
        _, n, batch = task
        x = self._inputs[batch] if n == 0 else self._take(Key("output", n - 1, batch))[0]
        x = x.to(self._pipeline._device)
        output = self._divided_forward(n, batch, x) if self._flow.is_divided(n) else None
        if output is None:
            output = self._whole_forward(n, batch, x)
        self._check_output(n, output, self._shapes[batch][n + 1])
        if n == self._flow.n - 1:
            self._loss(batch, output)
        else:
            self._give(Key("output", n, batch), [output])
        for key in self._flow.makes(task):
            if key.kind == "input":
                self._give(key, [x])
            elif key.kind == "weights":
                self._give_weights(key)
        weights = self._pipeline._weights.get(n)
        if weights is not None and self._is_last_here(n, batch):
            weights.done_forward(self._group(n, batch))

    def _check_output(self, n: int, output: Tensor, inferred: Spec) -> None:
        """Who receives it relies on this."""
        if spec_of(output) != inferred:
            raise Error(
                f"optfuse: layer {n} ({type(self._module[n]).__name__}) of a pipeline has made "
                f"{tuple(output.shape)} of {output.dtype}, and on the meta device "
                f"{tuple(inferred.shape)} of {inferred.dtype}; these must be the same, so run it "
                "without autocast, with shapes that don't depend on values"
            )

    def _whole_forward(self, n: int, batch: int, x: Tensor) -> Tensor:
        weights = self._pipeline._weights.get(n)
        layer, with_dx = self._module[n], self._flow.has("input_gradient", n)
        if weights is None and not with_dx:
            with torch.no_grad():
                found: Tensor = layer(x)
            return found
        version = weights.forward(self._group(n, batch)) if weights else {}
        replaced = weights.replaced if weights else set()
        graph = tasks.Graph(layer, version, x, with_dx, replaced)
        self._graphs[n, batch] = graph
        return graph.output

    def _divided_forward(self, n: int, batch: int, x: Tensor) -> Tensor:
        weights = self._pipeline._weights[n]
        version = weights.forward(self._group(n, batch))
        if not self._flow.is_far("weight_gradient", n):
            self._keep(Key("input", n, batch), [x])
        for part in self._flow.parts(n):
            if self._pipeline.weights == "stash" and not self._flow.is_far(PARTS[part], n):
                self._keep(Key("weights", n, batch, part), [version["weight"].detach()])
        with torch.no_grad():
            found: Tensor = torch.func.functional_call(self._module[n], version, (x,))
        return found

    def _loss(self, batch: int, output: Tensor) -> None:
        """With its gradient, which all backward passes begin with."""
        output = output.detach().requires_grad_(output.is_floating_point())
        with torch.enable_grad():
            loss = self._pipeline._loss_fn(output, self._targets[batch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise Error(
                "optfuse: the loss_fn of a Pipeline must return a tensor with one element; it has "
                f"returned {_short(loss)} for batch {batch}"
            )
        self._losses[batch] = loss.detach()
        key = Key("input_gradient", self._flow.n, batch)
        if any(True for _ in self._flow.users(key, self._batches)):
            with torch.enable_grad():
                weighted = loss if self._pipeline.losses == "sum" else loss * self._share(batch)
            self._give(key, list(torch.autograd.grad(weighted, output)))

    def _share(self, batch: int) -> float:
        """The batch's share of the rows of those that share its update."""
        group = self._flow.group_of(self._flow.n - 1, batch, self._batches)
        return self._rows(batch) / sum(map(self._rows, group))

    def _rows(self, batch: int) -> int:
        return self._shapes[batch][0].shape[0]

    def _input_gradient(self, task: Task) -> None:
        kind, n, batch = task
        part = PARTS.index(kind)
        dy = self._output_gradient(n, batch)
        if self._flow.is_divided(n):
            dx = self._divided_input_gradient(n, batch, part, dy)
        else:
            self._replace(n, batch)
            dx = self._graphs[n, batch].input_gradient(dy)
            if not self._flow.has("weight_gradient", n):
                del self._graphs[n, batch]
        self._give(Key("input_gradient", n, batch, part), [dx])

    def _divided_input_gradient(self, n: int, batch: int, part: int, dy: Tensor) -> Tensor:
        key = Key("weights", n, batch, part)
        layer, shape = self._module[n], self._shapes[batch][n].shape
        if self._flow.is_far(PARTS[part], n):
            (weight,) = self._take(key)
        elif self._pipeline.weights == "stash":
            weight = self._take(key)[0][:, self._flow.columns(n, part)].contiguous()
        else:
            weight = self._columns_for(key)
        return tasks.input_gradient(layer, dy, weight, shape)

    def _weight_gradient(self, task: Task) -> None:
        _, n, batch = task
        dy = self._output_gradient(n, batch)
        if self._flow.is_divided(n):
            (x,) = self._take(Key("input", n, batch))
            found = tasks.weight_gradient(self._module[n], dy, x)
        else:
            if not self._flow.has("input_gradient", n):
                self._replace(n, batch)
            found = self._graphs.pop((n, batch)).weight_gradient(dy)
        self._give_gradients(n, batch, found)

    def _update(self, task: Task) -> None:
        """All replicas add up the gradients of their batches in the order of these."""
        _, n, batch = task
        weights, plan = self._pipeline._weights[n], self._pipeline.plan
        if plan.micro_batches > 1:
            gradients = self._sums.pop(n)
        else:
            gradients = {}
            for b in self._flow.group_of(n, batch, self._batches):
                found = self._take(Key("gradients", n, b))
                _add(gradients, dict(zip(weights.parameters, found, strict=True)))
        if batch >= self._batches:  # of an incomplete group this replica has none
            weights.skip(self._group(n, batch))
        before = weights.before_update()
        given = [(weights.parameters[name], gradient) for name, gradient in gradients.items()]
        self._pipeline._updates.update(given)
        weights.after_update(before)
        for key in self._flow.makes(task):
            if key.batch < self._batches:
                self._give_weights(key)

    # Inputs and outputs of tasks

    def _output_gradient(self, n: int, batch: int) -> Tensor:
        parts = [self._take(key)[0] for key in self._flow.gradient(n + 1, batch)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, tasks.axis(self._module[n + 1]))

    def _give_gradients(self, n: int, batch: int, found: tasks.Gradients) -> None:
        """Gradients of micro-batches are added up at once, in the order of their dW."""
        place = self._pipeline.plan.places[n]
        self._pipeline._shared.take(n, found, self._transport)
        if self._pipeline.plan.micro_batches > 1:
            _add(self._sums.setdefault(n, {}), found)
            return
        if place.replicas == 1 and not self._flow.is_far("weight_gradient", n):
            self._local_gradients(n, batch, found)
            return
        names = [name for name, p in self._module[n].named_parameters() if p.requires_grad]
        unused = [name for name in names if name not in found]
        if unused:
            raise Error(
                f"optfuse: parameter {unused[0]!r} of layer {n} has no gradient for batch {batch}; "
                "layers whose gradients go to other processes must use all of their parameters"
            )
        self._give(Key("gradients", n, batch), [found[name] for name in names])

    def _group(self, n: int, batch: int) -> int:
        return self._groups[n] + batch // self._flow.groups[n]

    def _is_last_here(self, n: int, batch: int) -> bool:
        """Whether the batch is the last of its group on this process."""
        one_each = self._pipeline.plan.micro_batches == 1
        return one_each or batch == self._flow.group_of(n, batch, self._batches)[-1]

    def _replace(self, n: int, batch: int) -> None:
        """Sets the weights that the coming backward pass multiplies with."""
        weights = self._pipeline._weights.get(n)
        if weights is None or not weights.replaced:
            return
        group = self._group(n, batch)
        self._graphs[n, batch].replace(weights.backward(group))
        if self._is_last_here(n, batch):
            weights.done_backward(group)

    def _columns_for(self, key: Key) -> Tensor:
        """The columns of the weights that a part of dX is computed with."""
        weights = self._pipeline._weights[key.layer]
        group = self._group(key.layer, key.batch)
        whole = weights.backward(group, key.part)["weight"]
        weights.done_backward(group, key.part)
        return whole[:, self._flow.columns(key.layer, key.part)].contiguous()

    def _give_weights(self, key: Key) -> None:
        self._give(key, [self._columns_for(key)])

    def _local_gradients(self, n: int, batch: int, found: tasks.Gradients) -> None:
        names = self._pipeline._weights[n].parameters
        self._values[Key("gradients", n, batch)] = [found.get(name) for name in names], 1

    # Values

    def _keep(self, key: Key, tensors: list[Tensor]) -> None:
        """For one task of this process."""
        self._values[key] = list(tensors), 1

    def _give(self, key: Key, tensors: list[Tensor]) -> None:
        """To the tasks that need the value, here and elsewhere."""
        for to in self._flow.goes_to(key, self._process, self._batches):
            assert self._transport is not None
            self._transport.send(to, tensors, self._doing)
        uses = self._flow.uses(key, self._process, self._batches)
        if uses:
            self._values[key] = list(tensors), uses

    def _take(self, key: Key) -> list[Any]:
        if key in self._values:
            found, uses = self._values.pop(key)
        else:
            assert self._transport is not None
            found = self._transport.receive(self._flow.source(key), key, self._doing)
            uses = self._flow.uses(key, self._process, self._batches)
        if uses > 1:
            self._values[key] = found, uses - 1
        return found

    def _specs(self, key: Key) -> list[Spec]:
        """Shapes and dtypes of the tensors of a message."""
        layer, shapes = self._module, self._shapes[key.batch]
        if key.kind == "output":
            return [shapes[key.layer + 1]]
        if key.kind == "input":
            return [shapes[key.layer]]
        if key.kind == "gradients":
            return [spec_of(p) for p in layer[key.layer].parameters() if p.requires_grad]
        if key.kind == "weights":
            weight: Any = layer[key.layer].weight
            return [_part(spec_of(weight), 1, self._flow.columns(key.layer, key.part))]
        if key.layer == self._flow.n or self._pipeline.plan.places[key.layer].split is None:
            return [shapes[key.layer]]
        axis = tasks.axis(self._module[key.layer])
        return [_part(shapes[key.layer], axis, self._flow.columns(key.layer, key.part))]


def _part(spec: Spec, axis: int, columns: slice) -> Spec:
    sizes = list(spec.shape)
    sizes[axis] = len(range(*columns.indices(sizes[axis])))
    return Spec(torch.Size(sizes), spec.dtype)


def _add(total: tasks.Gradients, found: dict[str, Any]) -> None:
    """None: a parameter that was not used. What is added may still be on its way to others."""
    for name, gradient in found.items():
        if gradient is not None:
            total[name] = total[name] + gradient if name in total else gradient


def _device(module: nn.Sequential, layers: list[int]) -> torch.device:
    """The device of this process's layers."""
    found = {p.device for n in layers for p in module[n].parameters()}
    if len(found) > 1:
        raise Error(
            f"optfuse: layers of one process of a Pipeline are on {' and '.join(map(str, found))}; "
            "move them to one device"
        )
    return next(iter(found), torch.device("cpu"))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
