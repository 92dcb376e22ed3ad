"""Whether answers are what the packages of OpenAI and Anthropic expect: `types` compares them with
the packages' types, and `answers` gathers them from a gateway."""
