from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from runner.trained.words import literal


@given(st.text(alphabet=st.sampled_from("\\'\"${}[]a ,=:?#你\n"), max_size=12) | st.text(max_size=30))
def test_free_text_reaches_the_program_to_the_character(text: str) -> None:
    if text == "null":
        return
    (argument,) = literal([f"prompt={text}"], ("prompt",))
    override = OverridesParser.create().parse_override(argument)
    cfg = OmegaConf.create({"prompt": override.value()})
    assert OmegaConf.to_container(cfg, resolve=True) == {"prompt": text}


def test_other_words_and_flags_are_left_alone() -> None:
    given_words = ["top_k=5", "--cfg", "job", "prompt", "prompt=null", "data.path=a,b"]
    assert literal(given_words, ("prompt",)) == given_words
