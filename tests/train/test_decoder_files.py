"""The decoder's files, read by transformers and by the decoder itself."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import partita
from partita.errors import PartitaError
from partita.train.decoder import Decoder, DecoderShape
from partita.train.decoder_files import file_name, own_name, read_decoder_files, write_decoder_files
from tests.kit import seeds

SHAPE = DecoderShape(layers=2, width=32, heads=4, kv_heads=2, ffn_width=48)
TIED = DecoderShape(layers=1, width=32, heads=2, kv_heads=2, ffn_width=48, tied=True)


def written(folder: Path, shape: DecoderShape) -> Decoder:
    """Write a decoder's files as a run does, and return the decoder."""
    seeds.start(3)
    model = Decoder(shape)
    with partita.initialize(model, {"zero": {"stage": 0}}) as engine:
        engine.export(folder)
        engine.close(whole=True)
    write_decoder_files(folder, shape)
    return model


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_transformers_computes_the_same(tmp_path: Path, shape: DecoderShape) -> None:
    model = written(tmp_path, shape)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(256, (2, 20), generator=seeds.generator())
    torch.testing.assert_close(loaded(tokens, use_cache=False).logits, model(tokens), rtol=1e-4, atol=1e-5)
    again = Decoder(shape)
    read_decoder_files(tmp_path, again, tied=shape.tied)
    assert torch.equal(again(tokens), model(tokens))


def test_the_tokenizer_makes_bytes_tokens(tmp_path: Path) -> None:
    written(tmp_path, TIED)
    reader = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(256))) + " naïve\t€\n"
    assert reader(text)["input_ids"] == list(text.encode())
    assert reader.decode(list(text.encode())) == text


def test_names_are_converted_both_ways() -> None:
    names = [name for name, _ in Decoder(SHAPE).named_parameters()]
    assert [own_name(file_name(name)) for name in names] == names
    assert file_name("blocks.1.ffn.up.weight") == "model.layers.1.mlp.gate_up_proj.weight"


def test_files_of_another_decoder_are_refused(tmp_path: Path) -> None:
    written(tmp_path, TIED)
    with pytest.raises(PartitaError, match="weights '.*' are not those of the job's decoder; name the folder of a run"):
        read_decoder_files(tmp_path, Decoder(SHAPE), tied=False)
