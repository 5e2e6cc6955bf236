"""The answers of a model to the requests of tasks: what is done when an evaluation is stopped has a result, too."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task


class AnswerLog:
    def __init__(self) -> None:
        self.is_complete = False  # nothing is computed any more: requests get the answers that they have had
        self._answers: dict[tuple, list[Any]] = defaultdict(list)  # several of a request that a task repeats

    def add(self, request: Instance, answer: Any) -> None:
        self._answers[_key(request)].append(answer)

    def next_answer(self, request: Instance) -> Any:
        answers = self._answers[_key(request)]
        answers.append(answers.pop(0))  # in turn, as often as they are asked for
        return answers[-1]

    def count_documents(self, task: Task) -> int:
        """Return the number of documents, from the first one on, all of whose requests were answered."""
        if not vars(task).get("_instances"):
            return 0  # stopped while the requests were built
        missing = [request.doc_id or 0 for request in task.instances if len(self._answers[_key(request)]) < (request.repeats or 1)]
        documents = {request.doc_id or 0 for request in task.instances}
        return min(missing, default=len(documents))


def _key(request: Instance) -> tuple:
    return request.task_name, request.doc_id, request.request_type, request.idx, repr(request.args)
