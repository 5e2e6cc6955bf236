"""TensorBoard tracker: its settings, and the program that writes a run as TensorBoard's event files, without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from common.settings import flat_settings
from runner.tracking.config import TRACKERS, ExternalTrackerConfig
from runner.tracking.trackers.program import Experiment, read_history, run_program

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FLUSH_SECONDS = 5


@TRACKERS.register("tensorboard")
@dataclass
class TensorboardConfig(ExternalTrackerConfig):
    HAS_PROJECTS: ClassVar[bool] = False
    PACKAGE = "tensorboard"


class TensorboardLog:
    """Scalars `<kind>/<name>` (32-bit floats), samples and settings as text, settings as hyperparameters."""

    def __init__(self, experiment: Experiment) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        old = list(experiment.folder.glob("events.out.tfevents.*"))
        while experiment.is_replay and old:
            old.pop().unlink()
        # A reader forgets what follows this step in earlier files, which stay: an open one would miss all files after a
        # deleted one.
        self._step = self.history_from = (
            max((message["step"] for message in read_history(experiment)), default=0) if old else 0
        )
        self._event = event_pb2.Event
        self._writer = EventFileWriter(str(experiment.folder), flush_secs=FLUSH_SECONDS)
        self._write(session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        settings = dict(flat_settings(experiment.config))
        about = {
            "name": experiment.name,
            "group": experiment.group,
            "tags": ", ".join(experiment.tags),
            "note": experiment.note,
        }
        lines = [f"{name}: {value}" for name, value in (about | settings).items() if value not in ("", None)]
        self._write(summary=text_summary("settings", ["\n".join(lines)]))
        self._write(summary=_hparams_start(settings, experiment))
        self.location = f"{experiment.folder}; tensorboard --logdir {experiment.folder.parent}"

    def _write(self, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=self._step, **content))

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._step = step
        self._write(
            summary=Summary(
                value=[Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in numbers.items()]
            )
        )

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        self._step = step
        self._write(
            summary=text_summary("samples", [f"{sample['prompt']}\n -> {sample['answer']}" for sample in samples])
        )

    def finish(self, status: str, error: str) -> None:
        self._write(summary=text_summary("status", [f"{status} {error}".strip()]))
        self._write(summary=_hparams_end(status))
        self._writer.close()


def text_summary(tag: str, texts: list[str]) -> Summary:
    """Return texts for TensorBoard's text plugin, which renders Markdown: indented lines are shown as they are."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    return text_pb(tag, ["\n".join(f"    {line}" for line in text.split("\n")) for text in texts])


def _hparams_start(settings: dict[str, Any], experiment: Experiment) -> Summary:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in settings.items()
    }
    return hparams_pb(values, trial_id=experiment.id, start_time_secs=time.time())


def _hparams_end(status: str) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    result = api_pb2.STATUS_SUCCESS if status == "completed" else api_pb2.STATUS_FAILURE
    ended = plugin_data_pb2.HParamsPluginData(
        session_end_info=plugin_data_pb2.SessionEndInfo(status=result, end_time_secs=time.time())
    )
    return Summary(
        value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=metadata.create_summary_metadata(ended))]
    )


if __name__ == "__main__":
    run_program(TensorboardLog)
