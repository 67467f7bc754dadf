"""Breaks the code in each way below and shows the test that goes red: `make mutate`, or `python tools/mutate.py WORDS`.

Every promise has breaks here. A break that no test notices is a failure of this script. With WORDS, only breaks whose
promise or description contains one of them are tried. The working tree is not touched: a copy of it is.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "pyproject.toml",
    "conftest.py",
    "README.md",
    "CHANGELOG.md",
)
LIMIT_SECONDS = 300


class Break(NamedTuple):
    """One deliberate mistake."""

    promise: str
    what: str
    file: str  # below src/lockstep
    old: str  # stands there exactly once
    new: str
    tests: str  # where a test must go red


BREAKS = [
    Break(
        "same bits",
        "shards go through a model together although it gives them other bits",
        "replicas/module_capture.py",
        "return is_worth_it(samples.launches) and all(map(is_same, alone, together))",
        "return is_worth_it(samples.launches)",
        "tests/runtime/test_shards_together.py -k one_by_one",
    ),
    Break(
        "same bits",
        "all shards of a group have the statistics of the first",
        "replicas/module_capture.py",
        "buffers = {name: update[number] for name, update in updates.items()}",
        "buffers = {name: update[0] for name, update in updates.items()}",
        "tests/runtime/test_shards_together.py -k that_they_have_alone",
    ),
    Break(
        "same bits",
        "the tree is cut in the middle instead of at a power of two",
        "schedules/reduction_tree.py",
        "left = 1 << ((node.num_leaves - 1).bit_length() - 1)",
        "left = node.num_leaves // 2",
        "tests/schedules/test_reduction_tree.py",
    ),
    Break(
        "same bits",
        "a rank adds to the last leaf from the wrong side",
        "parallel/data.py",
        "for node in reversed([_rest(nodes[-1], left) for left in left_of_last_leaf(nodes[-1])])",
        "for node in [_rest(nodes[-1], left) for left in left_of_last_leaf(nodes[-1])]",
        "tests/schedules/test_proof.py -k 17-sharded",
    ),
    Break(
        "same bits",
        "an exchange adds what it receives first to last, not in the tree",
        "schedules/exchanges/gather.py",
        "tuple(Addition(0, 0, *children(node)) for node in missing_sums(known, num_shards)),",
        "tuple(Addition(0, 0, Node(0, n), Node(n, 1)) for n in range(1, num_shards)),",
        "tests/schedules/test_proof.py -k 'gather and 3-gather'",
    ),
    Break(
        "same bits",
        "buckets of ranks are started in different orders",
        "schedules/exchanges/collective.py",
        "for bucket, number in pipelined(len(buckets), len(own)):",
        "for bucket, number in pipelined(len(buckets), len(own))[:: 1 if rank else -1]:",
        "tests/schedules/test_proof.py -k '2-sharded'",
    ),
    Break(
        "same bits",
        "a rank that has all shards leaves its part out of the total",
        "runtime/workspace.py",
        "if part not in self._written:",
        "if False:",
        "tests/runtime/test_step.py -k assignment",
    ),
    Break(
        "same bits",
        "a copy on the same device is no copy",
        "backends/torch/__init__.py",
        "tensor.detach().to(torch_device(device), copy=True)",
        "tensor.detach().to(torch_device(device))",
        "tests/runtime/test_inprocess.py tests/backends/test_conformance.py",
    ),
    Break(
        "same bits",
        "ranks compute with several intra-op threads",
        "backends/torch/session.py",
        "    torch.set_num_threads(1)",
        "    torch.set_num_threads(2)",
        "tests/runtime/test_inprocess.py",
    ),
    Break(
        "same bits",
        "a function that makes a model has as many intra-op threads as there are cores",
        "training/validation.py",
        ', single_threaded(), threadpool_limits(1, "blas"):',
        ', threadpool_limits(1, "blas"):',
        "tests/training/test_train_module.py -k number_of_threads",
    ),
    Break(
        "same bits",
        "TorchScript compiles a function again after some calls",
        "backends/torch/session.py",
        "undo.callback(torch._C._jit_set_profiling_mode, torch._C._jit_set_profiling_mode(False))",
        "pass",
        "tests/training/test_train_module.py -k torchscript",
    ),
    Break(
        "same bits",
        "forked ranks have the autocast that the caller has",
        "backends/torch/session.py",
        "                modes.enter_context(torch.autocast(kind, enabled=False))",
        "                pass",
        "tests/training/test_train_module.py -k modes_of_the_caller",
    ),
    Break(
        "same bits",
        "what a collate_fn draws depends on what was drawn before",
        "data/loader.py",
        "            with seeded(self._seed, request.epoch, request.samples[0], COLLATE):",
        "            if True:",
        "tests/data/test_loader.py -k collate_fn",
    ),
    Break(
        "same bits",
        "dropout continues from shard to shard instead of being keyed",
        "replicas/keyed_random.py",
        "        self.generator.manual_seed(seed)\n",
        "",
        "tests/replicas/test_same_bits.py tests/replicas/test_keyed_random.py",
    ),
    Break(
        "same bits",
        "the order of samples is the same in every epoch",
        "data/order.py",
        "keyed_random(seed, epoch, 0)",
        "keyed_random(seed, 0, 0)",
        "tests/data/test_order.py",
    ),
    Break(
        "same bits",
        "running statistics are merged in another order of shards",
        "replicas/running_stats.py",
        "for stats, calls in found:",
        "for stats, calls in reversed(found):",
        "tests/replicas/test_buffers.py",
    ),
    Break(
        "same bits",
        "a captured step leaves out the buffers of other ranks",
        "runtime/cuda_graph.py",
        "            interpreter.results()  # here, so that copies of others' buffers are captured too\n",
        "",
        "tests/runtime/test_cuda_graph.py -k resumed",
    ),
    Break(
        "same bits",
        "captured steps go on with the first step's bf16 weights",
        "replicas/module_capture.py",
        "            self._halves.refresh()\n",
        "            pass\n",
        "tests/runtime/test_cuda_graph.py -k cast_weights",
    ),
    Break(
        "same bits",
        "a captured step goes on with the first batch that was loaded",
        "data/static_input.py",
        "                torch._foreach_copy_(leaves_of(static), stage.tensors[start])\n",
        "                pass\n",
        "tests/runtime/test_cuda_graph.py -k loaded",
    ),
    Break(
        "same bits",
        "compiled dropout continues from shard to shard",
        "replicas/keyed_random.py",
        "        if seed is not None:\n            self.start(seed)\n",
        "        if seed is not None:\n            pass\n",
        "tests/training/test_compile.py -k dropout -m long",
    ),
    Break(
        "nothing lost",
        "a forward pass writes to buffers that are being copied",
        "replicas/module.py",
        "            self._pinned.wait()  # a forward pass writes to buffers\n",
        "",
        "tests/replicas/test_module_state.py",
    ),
    Break(
        "same bits",
        "threads that call allreduce at once share its interpreters",
        "runtime/allreduce.py",
        "one_thread(get_ident(), backend",
        "one_thread(get_ident() * 0, backend",
        "tests/runtime/test_allreduce.py",
    ),
    Break(
        "same bits",
        "allreduce reuses interpreters that have stopped halfway",
        "runtime/allreduce.py",
        "            one_thread.cache_clear()  # this one has stopped halfway\n",
        "",
        "tests/runtime/test_allreduce.py",
    ),
    Break(
        "exact counting",
        "a mean of means: the total is divided by the number of shards",
        "replicas/flat.py",
        "total / batch.divisor",
        "total / (len(batch.shard_sizes) * batch.shard_sizes[0])",
        "tests/runtime/test_step.py -k uneven",
    ),
    Break(
        "exact counting",
        "the same for modules",
        "replicas/module_update.py",
        "torch.div(total, batch.divisor, ",
        "torch.div(total, len(batch.shard_sizes) * batch.shard_sizes[0], ",
        "tests/replicas/test_same_bits.py tests/training/test_train_module.py",
    ),
    Break(
        "exact counting",
        "the last batch of the test samples is not evaluated",
        "training/evaluate.py",
        "own = [eval_batches[number] for number in shares.get(rank, ())]",
        "own = [eval_batches[n] for n in shares.get(rank, ()) if n + 1 < len(eval_batches) or n == 0]",
        "tests/backends/test_conformance.py tests/test_api.py tests/runtime/test_step.py",
    ),
    Break(
        "exact counting",
        "a batch loses its remainder",
        "partition/batch.py",
        "starts = [part * size + min(part, rest) for part in range(num_parts + 1)]",
        "starts = [part * size for part in range(num_parts + 1)]",
        "tests/partition",
    ),
    Break(
        "nothing lost",
        "a checkpoint has no optimizer state",
        "training/replica_set.py",
        "            return self.local[0].state_dict()\n",
        "            return ReplicaState({}, {})\n",
        "tests/training/test_checkpoint.py",
    ),
    Break(
        "nothing lost",
        "a file is written in place instead of renamed",
        "core/files.py",
        'temporary = path.with_name(f"{PART}{path.name}")',
        "temporary = path",
        "tests/report/test_runlog.py tests/training/test_checkpoint.py",
    ),
    Break(
        "nothing lost",
        "the oldest state wins when workers meet again",
        "training/elastic.py",
        "newest = max([position for",
        "newest = min([position for",
        "tests/training/test_elastic.py",
    ),
    Break(
        "nothing lost",
        "a drifted replica is saved",
        "training/loop.py",
        "            self.state.compare()\n            self._save_now()",
        "            self._save_now()",
        "tests/training/test_drift.py",
    ),
    Break(
        "nothing lost",
        "damaged bytes are not noticed",
        "core/serialization.py",
        'if inner["sha256"] != _sha256(inner["tree"], arrays):',
        "if False:",
        "tests/core/test_serialization.py",
    ),
    Break(
        "nothing lost",
        "a run resumes with another seed",
        "training/resume.py",
        "    check_same_run(found.run, identity, config)\n",
        "",
        "tests/training/test_checkpoint.py",
    ),
    Break(
        "plain answers",
        "an error does not name the phase",
        "runtime/interpreter.py",
        '            rank.position.phase = "exchange"\n',
        "",
        "tests/runtime/test_overlap.py -k 'names_that_phase or with_that_phase'",
    ),
    Break(
        "plain answers",
        "the impossible is found after the run's folder was made",
        "config.py",
        "object.__setattr__(self, each.name, checked(each, TYPES[each.name], getattr(self, each.name)))",
        "pass",
        "tests/test_config.py tests/cli/test_train.py",
    ),
    Break(
        "plain answers",
        "an unknown name is answered without the nearest one",
        "core/registry.py",
        "near = difflib.get_close_matches(name, list(names), n=1)",
        "near: list[str] = []",
        "tests/core/test_registry.py",
    ),
    Break(
        "plain answers",
        "LeNet scores the corner of a larger image",
        "models/lenet.py",
        "if shape[1:] not in (IMAGE, IMAGE[1:]):",
        "if False:",
        "tests/models/test_lenet.py",
    ),
    Break(
        "nothing left behind",
        "malloc's settings stay",
        "backends/malloc.py",
        "            _mallopt(setting.number, value_before(setting))",
        "            pass",
        "tests/backends/test_malloc.py",
    ),
    Break(
        "nothing left behind",
        "leaves stay in memory until the end of a step",
        "runtime/interpreter.py",
        "                self.state.sums.drop(part)\n",
        "                pass\n",
        "tests/runtime/test_interpreter.py",
    ),
    Break(
        "nothing left behind",
        "allreduce keeps the user's tensors",
        "runtime/interpreter.py",
        "        self.workspace.use_as_total(None)\n",
        "",
        "tests/runtime/test_allreduce.py",
    ),
    Break(
        "nothing lost",
        "a checkpoint that was skipped pushes out a good one",
        "training/checkpoint.py",
        "[each for each in self.paths() if each not in self._skipped and not each.is_dir()]",
        "self.paths()",
        "tests/training/test_checkpoint.py -k skipped",
    ),
    Break(
        "nothing left behind",
        "lockstep bench waits for the children of a contender that was killed",
        "bench/processes.py",
        "                self._kill_orphans()\n",
        "",
        "tests/bench/test_measure.py -k killed",
    ),
    Break(
        "plain answers",
        "an error in an exchange that overlaps is taken for a hang",
        "runtime/inprocess.py",
        "                raise Cancelled\n            future.result()\n",
        "                raise Cancelled\n            if future.exception():\n                raise Cancelled\n",
        "tests/runtime/test_overlap.py -k error_in_the_exchange",
    ),
    Break(
        "plain answers",
        "who hangs in an exchange that overlaps is not named",
        "runtime/inprocess.py",
        " or self._exchanges.get(r) in hung]",
        "]",
        "tests/runtime/test_overlap.py -k hangs_in_the_exchange",
    ),
    Break(
        "same time",
        "the first epoch's time leaves out a whole step",
        "training/step_times.py",
        "extra += max(0.0, seconds[0] - expected)",
        "extra += seconds[0]",
        "tests/training src/lockstep/training/step_times.py -k 'step_times or StepTimes'",
    ),
    Break(
        "exact counting",
        "a loss with weights is divided by the number of samples",
        "replicas/replica.py",
        "divisor = sum(self.shard_sizes) if self.weights is None else math.fsum(self.weights)",
        "return sum(self.shard_sizes)",
        "tests/training/test_losses_of_batches.py",
    ),
    Break(
        "exact counting",
        "batches that are accumulated are a mean of means",
        "replicas/trainer_replica.py",
        "return AccumulatedSum(self.total + other.total, self.divisor + other.divisor, self.used | other.used)",
        "return AccumulatedSum(self.total / self.divisor + other.total / other.divisor, 2.0, self.used | other.used)",
        "tests/training/test_trainer.py",
    ),
    Break(
        "same bits",
        "shards that were computed again are not compared",
        "runtime/verification.py",
        "        if number is None:\n            return\n",
        "        if number != -1:\n            return\n",
        "tests/training/test_verification.py",
    ),
    Break(
        "same bits",
        "the average of the weights has the buffers of a rank's last shard",
        "replicas/module.py",
        "        self._buffers.merge(batch.buffers, batch.shard_sizes)\n        self._step_optimizer(batch.norms)\n",
        "        self._step_optimizer(batch.norms)\n        self._buffers.merge(batch.buffers, batch.shard_sizes)\n",
        "tests/training/test_trainer.py",
    ),
    Break(
        "same bits",
        "a sampler draws from the random numbers of the process",
        "data/sampler.py",
        "with seeded(self._seed, epoch, 0, SAMPLER):",
        "if True:",
        "tests/data/test_sampler.py",
    ),
    Break(
        "exact counting",
        "the loss of an epoch that was stopped is divided by all samples",
        "training/loop.py",
        "if progress.weights else self._num_seen()",
        "if progress.weights else task.num_train",
        "tests/training/test_callbacks.py",
    ),
    Break(
        "nothing lost",
        "a run that is stopped in mid-epoch saves nothing",
        "training/loop.py",
        '        if name == "on_step" and self._config.checkpoint_every != 0:\n',
        "        if False:\n",
        "tests/training/test_callbacks.py",
    ),
    Break(
        "nothing lost",
        "a checkpoint is pruned right after it was written",
        "training/checkpoint.py",
        "[each for each in usable if _step_of(each) < step]",
        "usable",
        "tests/training/test_hostile_files.py",
    ),
    Break(
        "same bits",
        "the check of a loss uses up random numbers",
        "replicas/loss_check.py",
        "generator.set_state(before)  # the step itself",
        "pass  # the step itself",
        "tests/training/test_losses_of_batches.py",
    ),
    Break(
        "same bits",
        "ranks with different processors train on",
        "training/state.py",
        "        if names := [name for name in {**first, **other} if first.get(name) != other.get(name)]:\n",
        "        if names := list[str]():\n",
        "tests/training/test_other_processors.py",
    ),
    Break(
        "nothing lost",
        "a replica that has drifted is saved when the run is interrupted",
        "training/loop.py",
        "                self.state.compare()  # a replica that has drifted is never saved\n",
        "",
        "tests/training/test_drift.py",
    ),
    Break(
        "nobody else",
        "ranks are not asked for the secret",
        "runtime/process_group.py",
        "        if secret is not None:\n",
        "        if False:\n",
        "tests/runtime/test_process_group.py",
    ),
    Break(
        "same bits",
        "gradients between captured steps are computed with the bf16 weights of the last one",
        "replicas/trainer_replica.py",
        "        return ModuleReplica.forward_backward(self, shards, all_gather)\n",
        "        return self.forward_backward(shards, all_gather)\n",
        "tests/runtime/test_cuda_graph.py -k between",
    ),
    Break(
        "plain answers",
        "memory that runs out while two shards are verified ends the run without a number of shards that fits",
        "runtime/verification.py",
        "                if not is_out_of_memory(problem):\n                    raise\n",
        "                raise\n",
        "tests/runtime/test_cuda_graph.py -k fit",
    ),
    Break(
        "nobody else",
        "ranks that a stranger was faster than do not connect once more",
        "runtime/launch/worker_client.py",
        "MAX_ATTEMPTS, PROOF_SECONDS = 10,",
        "MAX_ATTEMPTS, PROOF_SECONDS = 1,",
        "tests/runtime/test_supervisor.py",
    ),
    Break(
        "nobody else",
        "a mark in torchrun's store that anybody can write keeps all ranks silent",
        "runtime/authenticated_store.py",
        "content if hmac.compare_digest(mark, self._mark(key, content)) else None",
        "content",
        "tests/training/test_torchrun.py -k mark",
    ),
    Break(
        "plain answers",
        "the time in which a worker gives no sign of life does not add up",
        "runtime/launch/silence.py",
        "            now.seconds = before.seconds + min(passed, 2 * SECONDS)\n",
        "            now.seconds = min(passed, 2 * SECONDS)\n",
        "tests/runtime/test_silence.py",
    ),
    Break(
        "nobody else",
        "a header of any size becomes Python objects",
        "core/serialization.py",
        "        if _header_length(data) > MAX_HEADER:\n",
        "        if False:\n",
        "tests/core/test_serialization.py -k header",
    ),
    Break(
        "nobody else",
        "weights are read that no such model has",
        "training/evaluate_run.py",
        "read_weights(folder, max_bytes_of(task.initial))",
        "read_weights(folder, 1 << 62)",
        "tests/training/test_hostile_files.py -k weights_that",
    ),
    Break(
        "plain answers",
        "workers whose supervisor was killed print a traceback",
        "runtime/launch/supervisor.py",
        "        except SupervisorGone:",
        "        except ZeroDivisionError:",
        "tests/runtime/test_supervisor.py",
    ),
    Break(
        "plain answers",
        "a second interrupt is raised in the middle of a fork",
        "runtime/launch/supervisor.py",
        "notify=not quiet, raises=False",
        "notify=not quiet, raises=True",
        "tests/runtime/test_supervisor.py",
    ),
    Break(
        "nothing lost",
        "a disk that fails when a finished run is closed undoes it",
        "report/runlog.py",
        "            with contextlib.suppress(OSError):  # of a disk that fails: it is closed all the same\n",
        "            with contextlib.nullcontext():\n",
        "tests/report/test_runlog.py -k a_disk_that_fails",
    ),
    Break(
        "plain answers",
        "a GPU is left idle where two devices are asked for",
        "core/device.py",
        "return [gpus[i % len(gpus)] if gpus else",
        "return [gpus[i] if len(gpus) >= wanted else",
        "tests/core/test_device.py",
    ),
    Break(
        "nothing lost",
        "an interrupt loses what was trained",
        "training/loop.py",
        "        if weights := task.whole(self.state.replicas.weights()) if saves else stopped.weights:\n",
        "        if weights := {}:\n",
        "tests/training/test_interrupted.py",
    ),
    Break(
        "plain answers",
        "the report asks another server for its style",
        "report/templates/report.html",
        "<style>\n:root {",
        "<style>\n@import url(https://example.org/style.css);\n:root {",
        "tests/cli/test_report.py",
    ),
    Break(
        "plain answers",
        "every rank logs",
        "training/elastic.py",
        "self.log if rank == 0 else None",
        "self.log",
        "tests/report/test_loggers.py",
    ),
    Break(
        "plain answers",
        "a speed-up is stated for batches of different sizes",
        "training/findings.py",
        "grouped(self.rows, lambda row: row.same_speed)",
        "grouped(self.rows, lambda row: None)",
        "tests/training/test_sweep.py",
    ),
    Break(
        "same bits",
        "gradients of slices are added first to last, not in the tree",
        "replicas/sliced_layers.py",
        "    for node, left, right in call.share.sums:\n        nodes[node] = nodes[left] + nodes[right]\n",
        "    nodes[Node(0, len(call.widths))] = sum(gathered[1:], gathered[0])\n",
        "tests/training/test_splits.py -k 'same_slices and layers and residual'",
    ),
    Break(
        "same bits",
        "a tensor that crosses a cut in two places is two tensors",
        "replicas/crossing.py",
        "if id(part) not in numbers:",
        "if True:",
        "tests/replicas/test_crossing.py",
    ),
    Break(
        "same bits",
        "what tracing leaves out of a network that is cut is not noticed",
        "replicas/stage_graph.py",
        "settings_of_thread() != self._settings",
        "False",
        "tests/training/test_split_checks.py",
    ),
    Break(
        "same bits",
        "every stage draws dropout from the start of a shard's random numbers",
        "replicas/part_replica.py",
        "random=cut.random, is_cut=True",
        "random=None, is_cut=True",
        "tests/training/test_splits.py -k 'every_split and network and sequential'",
    ),
    Break(
        "same bits",
        "a rank clips by the norms of its own parameters",
        "runtime/interpreter.py",
        "for rank in found for name, norm in (rank.norms or {}).items()}",
        "for name, norm in norms.items()}",
        "tests/training/test_splits.py -k 'every_split and clipped'",
    ),
    Break(
        "nothing lost",
        "a step is counted after ranks have agreed on whether to stop, which may fail",
        "training/loop.py",
        "            while len(in_flight) > max_in_flight:  # counted before a collective can fail: it has happened\n"
        "                yield from self._finish_step(*in_flight.popleft(), began)\n"
        "            is_stopping = stop.stops()\n",
        "            is_stopping = stop.stops()\n"
        "            while len(in_flight) > max_in_flight:\n"
        "                yield from self._finish_step(*in_flight.popleft(), began)\n",
        "tests/training/test_rare_moments.py",
    ),
    Break(
        "same bits",
        "new parameters are handed out before they are updated",
        "parallel/combined.py",
        "Update(tuple(total)), *gathered]",
        "*gathered, Update(tuple(total))]",
        "tests/parallel/test_combined.py",
    ),
    Break(
        "same bits",
        "a stage does not hand on what only a later one needs",
        "replicas/stage_graph.py",
        "stages[u]) >= stage for u in node.users)",
        "stages[u]) == stage for u in node.users)",
        "tests/replicas/test_stages.py -k one_after_the_other",
    ),
    Break(
        "same bits",
        "stages are not compared with the whole module",
        "replicas/stage_check.py",
        "        if found == expected:",
        "        if True:",
        "tests/training/test_traced_stages.py -k refused",
    ),
    Break(
        "same bits",
        "ranks that multiply with different libraries are not told apart",
        "backends/torch/kernel_choice.py",
        '"oneDNN" if multiplies_with_onednn() else',
        '"oneDNN" if False else',
        "tests/backends/torch/test_linear_cpu.py -k compare",
    ),
    Break(
        "nothing lost",
        "an average stays beside the weights of a later epoch",
        "report/runlog.py",
        "                    if event.weights:\n",
        "                    if False:\n",
        "tests/report/test_runlog.py -k average",
    ),
    Break(
        "same bits",
        "stages that were traced multiply with another library than the whole module",
        "backends/torch/cpu_kernels.py",
        "(F, torch._C._nn), our_linear",
        "(F,), our_linear",
        "tests/backends/torch/test_linear_cpu.py -k stages",
    ),
    Break(
        "same bits",
        "a rank that was cut off in mid-update offers its parameters as those of a step",
        "training/elastic.py",
        "if not client.position.is_mid_update:",
        "if True:",
        "tests/training/test_split_failures.py -k handed_out",
    ),
    Break(
        "same bits",
        "statistics of a checkpointed forward pass are counted again in stages only",
        "replicas/module.py",
        "gradients, vector, self._own, updates)",
        "gradients, vector, self._own)",
        "tests/training/test_traced_stages.py -k checkpointed",
    ),
    Break(
        "same bits",
        "what goes from stage to stage arrives with other strides",
        "backends/torch/strides.py",
        "torch.empty_strided(shape, strides, dtype",
        "torch.empty(shape, dtype",
        "tests/runtime/test_stage_messages.py",
    ),
    Break(
        "same time",
        "a stage takes a shard more forward than 1f1b does",
        "schedules/pipeline_orders.py",
        "num_ahead = min(len(stages) - place - 1, len(shards))",
        "num_ahead = min(len(stages) - place, len(shards))",
        "tests/parallel/test_combined.py tests/schedules/test_pipeline_orders.py",
    ),
    Break(
        "nothing lost",
        "a checkpoint has the optimizer's state of the first stage only",
        "training/replica_set.py",
        "if self.placement.shards_update else self.placement.owners\n",
        "if self.placement.shards_update else [0]\n",
        "tests/training/test_replica_set.py",
    ),
    Break(
        "nothing lost",
        "a state of which a stage was lost is continued from",
        "training/elastic.py",
        "held in held_at if held >= needed], default",
        "held in held_at if held], default",
        "tests/training/test_elastic.py",
    ),
    Break(
        "same bits",
        "a large vector is used again while somebody reads it",
        "backends/torch/large_vectors.py",
        "if len(vector) == size and _num_users(vector) == _NUM_USERS_OF_FREE:",
        "if len(vector) == size:",
        "tests/backends/torch/test_large_vectors.py",
    ),
    Break(
        "plain answers",
        "work that is slowed by sharing hardware counts as perfect",
        "attribution/waterfall.py",
        "    alone = share / slowdown  #",
        "    alone = share  #",
        "tests/attribution/test_waterfall.py",
    ),
    Break(
        "plain answers",
        "a step is explained by the first rank, whoever the others waited for",
        "attribution/step_times.py",
        "    return max(range(len(ranks)), key=lambda rank: ranks[rank].work)",
        "    return 0",
        "tests/attribution",
    ),
    Break(
        "plain answers",
        "the bubble of a pipeline is blamed on the link",
        "attribution/waterfall.py",
        "        found.append(max(0.0, min(waits, own.idle + own.exchange)))",
        "        found.append(0.0)",
        "tests/attribution/test_waterfall.py",
    ),
    Break(
        "same bits",
        "what a traced run measures at its end updates the weights",
        "training/calibration.py",
        "        held = [WithoutUpdate(replica) for replica in self._replicas.local]",
        "        held = self._replicas.local",
        "tests/analysis/test_explain.py -k calibration",
    ),
    Break(
        "nothing lost",
        "an interrupted run loses its trace",
        "training/loop.py",
        "        yield from self._trace.of_all(self.state) if saves else self._trace.of_this_process(self.state)\n",
        "",
        "tests/analysis/test_explain.py -k interrupted",
    ),
    Break(
        "nothing left behind",
        "what a stage got of a shard is kept for ever",
        "replicas/part_replica.py",
        "self.value.register_hook(self._taken.append)",
        "self.value.register_hook(lambda found: self._taken.append(found))",
        "tests/training/test_memory.py -k network",
    ),
    Break(
        "nothing left behind",
        "a graph that is kept for layers in slices holds its own outputs",
        "replicas/buffers.py",
        "in memories else tensor.detach()",
        "in memories else tensor",
        "tests/training/test_memory.py -k layers",
    ),
    Break(
        "same bits",
        "the rows that were looked up are left out of a tied weight's gradient",
        "replicas/tied_weights.py",
        "return looked_up if of_copy is None else (of_copy, looked_up)",
        "return looked_up if of_copy is None else of_copy",
        "tests/replicas/test_tied_weights.py",
    ),
    Break(
        "plain answers",
        "a plan leaves out what whole steps of several devices took",
        "analysis/step_costs.py",
        "times = profile.correction(grid.num_ranks, grid.kind, configuration.num_shards)",
        "times = 1.0",
        "tests/analysis/test_step_costs.py",
    ),
]


def is_stale(one: Break, root: Path = ROOT) -> bool:
    """Whether the text to replace is not there exactly once any more."""
    return (root / "src" / "lockstep" / one.file).read_text().count(one.old) != 1


def red_test(one: Break, root: Path) -> str:
    """The first test that fails with the break; empty if none does."""
    file = root / "src" / "lockstep" / one.file
    whole = file.read_text()
    file.write_text(whole.replace(one.old, one.new))
    try:
        command = f"{sys.executable} -m pytest -q -x -m 'not long' -p no:cacheprovider --no-header {one.tests}"
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "LOCKSTEP_BACKENDS": "torch,numpy"}
        done = subprocess.run(
            command, shell=True, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"(no test ended within {LIMIT_SECONDS} s)"
    finally:
        file.write_text(whole)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if done.returncode == 1 and found else ""


def main(words: list[str]) -> int:
    """Tries the breaks; the number of those that no test noticed."""
    chosen = [b for b in BREAKS if not words or any(word in f"{b.promise} {b.what} {b.file}" for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-mutate-") as name:
        root = Path(name)
        for entry in COPIED:
            source = ROOT / entry
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, root / entry)
        for one in chosen:
            red = "(the code has changed: update tools/mutate.py)" if is_stale(one) else red_test(one, root)
            is_missed = not red or red.startswith("(")
            missed += is_missed
            print(
                f"{'MISSED' if is_missed else 'red   '} {one.promise}: {one.what}\n         {red or 'no test'}",
                flush=True,
            )
    print(f"{len(chosen) - missed} of {len(chosen)} breaks turn a test red")
    return missed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
