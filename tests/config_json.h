/*
config_json.h: tests of JSON (llmc/base/json.h) and of config.json (llmc/model/config_json.h).
*/
#pragma once
#include "checkpoint_files.h"

// ---------------------------------------------------------------------------------------------------------------------
// json.h

static void test_json_numbers(void) {
    TestRandom random = {3};
    for (int i = 0; i < 3000; i++) {
        uint64_t bits = test_random_bits(&random), u = bits >> test_random_int(&random, 64), back = 0;
        double x;
        memcpy(&x, &bits, 8);
        if (i % 3 == 0) x = test_random_real(&random);
        if (i % 3 == 1) x = floor(ldexp(test_random_real(&random), 54));
        if (!isfinite(x)) continue;
        cJSON *o = cJSON_CreateObject();
        cJSON_AddNumberToObject(o, "x", x);
        json_add_u64(o, "u", u);
        size_t size = 0;
        char *text = json_text(o, &size);
        cJSON_Delete(o);
        o = json_parse(text, size);
        double y = 0;
        EXPECT(json_get_number(o, "x", &y) && memcmp(&x, &y, 8) == 0, "%a came back as %a from %s", x, y, text);
        EXPECT(json_get_u64(o, "u", &back) && back == u, "%" PRIu64 " came back as %" PRIu64 " from %s", u, back, text);
        cJSON_Delete(o);
        free(text);
    }
    const char *bad[] = {"{\"u\":\"18446744073709551616\"}",
                         "{\"u\":\"-1\"}",
                         "{\"u\":\"\"}",
                         "{\"u\":1.5}",
                         "{\"u\":-1}",
                         "{\"u\":\" 1\"}",
                         "{\"u\":1e300}",
                         "{\"v\":1}",
                         "{\"u\":null}"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint64_t u = 0;
        cJSON *o = json_parse(bad[i], strlen(bad[i]));
        EXPECT(o && !json_get_u64(o, "u", &u), "%s has an integer %" PRIu64, bad[i], u);
        cJSON_Delete(o);
    }
    EXPECT(!json_parse("{} x", 4) && !json_parse("{\"a\":1,", 7) && !json_parse("{}\0{}", 5) && !json_parse("", 0),
           "not one JSON value, and parsed");
}

static void test_json_strings(void) {
    static const struct {
        const char *from, *to;
    } cases[] = {
        {"a\"b\\c\n\t\x01\x7f", "a\\\"b\\\\c\\u000a\\u0009\\u0001\\u007f"},
        {"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80", "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"}, // 2, 3 and 4 bytes
        {"\xC3", "\xEF\xBF\xBD"},                                                             // cut
        {"\x80z", "\xEF\xBF\xBDz"},                                                           // no first byte
        {"\xC0\xAF", "\xEF\xBF\xBD\xEF\xBF\xBD"},                                             // overlong
        {"\xE0\x80\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},                             // overlong
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},                             // a surrogate
        {"\xF5\x80", "\xEF\xBF\xBD\xEF\xBF\xBD"},                                             // beyond U+10FFFF
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t size = 0;
        cJSON *s = cJSON_CreateString(cases[i].from);
        char *text = json_text(s, &size);
        EXPECT(strcmp(text, test_text("\"%s\"\n", cases[i].to)) == 0, "case %zu is %s", i, text);
        cJSON_Delete(s);
        free(text);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// config_json.h

static void test_config_round_trip(void) {
    TestDirectory d = test_make_directory();
    const char *path = test_text("%s/config.json", d.path);
#define SHAPES                                                                                                    \
    "  \"vocab_size\": 11,\n  \"hidden_size\": 12,\n  \"num_hidden_layers\": 2,\n  \"num_attention_heads\": 2,\n" \
    "  \"num_key_value_heads\": 1,\n  \"head_dim\": 8,\n  \"intermediate_size\": 20,\n"                           \
    "  \"max_position_embeddings\": 32,\n  \"rope_theta\": 10000,\n  \"rms_norm_eps\": 1e-05,\n"
#define PLAIN(class_name, type, windows)                                                                      \
    "{\n  \"architectures\": [\"" class_name "ForCausalLM\"],\n  \"model_type\": \"" type "\",\n" SHAPES      \
    "  \"tie_word_embeddings\": false,\n  \"torch_dtype\": \"float32\",\n" windows                            \
    "  \"hidden_act\": \"silu\",\n  \"attention_bias\": false,\n  \"mlp_bias\": false,\n  \"bos_token_id\": " \
    "null,\n  \"eos_token_id\": null\n}\n"
#define DIFFV2(attention, dtype, more)                                                                   \
    "{\n  \"architectures\": [\"DiffV2ForCausalLM\"],\n  \"model_type\": \"diffv2\",\n  \"attention\": " \
    "\"" attention "\",\n" SHAPES "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"" dtype "\"" more "\n}\n"
#define WINDOWS(window, first, second) \
    "  \"sliding_window\": " window ",\n  \"layer_types\": [\"" first "_attention\", \"" second "_attention\"]"
#define SWITCHED(window, first, second)                                                                 \
    "  \"sliding_window\": " window ",\n  \"use_sliding_window\": true,\n  \"max_window_layers\": 0,\n" \
    "  \"layer_types\": [\"" first "_attention\", \"" second "_attention\"],\n"
#define QK_NORM "  \"use_qk_norm\": true"
    static const struct {
        const char *attention;
        int window, full_every;
        bool yoco, qk_norm;
        const char *text;
    } cases[] = {
        {"baseline", 0, 0, false, false, PLAIN("Llama", "llama", "")},
        {"diff_v2", 0, 0, false, false, DIFFV2("diff_v2", "bfloat16", "")},
        {"baseline", 4, 0, false, false, PLAIN("Ministral", "ministral", WINDOWS("4", "sliding", "sliding") ",\n")},
        {"baseline", 4, 2, false, false, PLAIN("Ministral", "ministral", WINDOWS("4", "sliding", "full") ",\n")},
        // these classes generate other tokens with a window of 1, and have no YOCO
        {"baseline", 1, 0, false, false, DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("1", "sliding", "sliding"))},
        {"baseline", 4, 0, true, false,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("4", "sliding", "full") ",\n  \"yoco\": true")},
        {"diff_v2", 4, 2, false, false, DIFFV2("diff_v2", "bfloat16", ",\n" WINDOWS("4", "sliding", "full"))},
        {"baseline", 0, 0, false, true, PLAIN("Qwen3", "qwen3", QK_NORM ",\n")},
        {"baseline", 4, 0, false, true, PLAIN("Qwen3", "qwen3", SWITCHED("4", "sliding", "sliding") QK_NORM ",\n")},
        {"baseline", 4, 2, false, true, PLAIN("Qwen3", "qwen3", SWITCHED("4", "sliding", "full") QK_NORM ",\n")},
        {"baseline", 1, 0, false, true,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("1", "sliding", "sliding") ",\n" QK_NORM)},
        {"baseline", 4, 0, true, true,
         DIFFV2("baseline", "bfloat16", ",\n" WINDOWS("4", "sliding", "full") ",\n  \"yoco\": true,\n" QK_NORM)},
        {"diff_v2", 0, 2, false, false,
         DIFFV2("diff_v2", "bfloat16", ",\n  \"sparse_blocks\": 2,\n  \"sparse_block_size\": 4,\n  \"full_every\": 2")},
        {"diff_grouped_2", 0, 0, false, true, DIFFV2("diff_grouped_2", "bfloat16", ",\n" QK_NORM)},
        {"sink", 4, 0, false, true, DIFFV2("sink", "bfloat16", ",\n" WINDOWS("4", "sliding", "sliding") ",\n" QK_NORM)},
        {"baseline", 0, 0, false, false,
         PLAIN("Llama", "llama",
               "  \"parametrization\": \"completep\",\n  \"base_hidden_size\": 32,\n"
               "  \"base_num_hidden_layers\": 0,\n")},
    };
#undef SHAPES
#undef PLAIN
#undef DIFFV2
#undef WINDOWS
#undef SWITCHED
#undef QK_NORM
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool plain = !strstr(cases[i].text, "diffv2");
        ModelConfig c = ckpt_config(cases[i].attention, !plain);
        c.window = cases[i].window, c.full_every = cases[i].full_every, c.yoco = cases[i].yoco;
        c.qk_norm = cases[i].qk_norm;
        if (strstr(cases[i].text, "completep")) c.parametrization = PARAMETRIZATION_COMPLETEP, c.base_width = 32;
        bool sparse = strstr(cases[i].text, "sparse") != NULL;
        if (sparse) c.sparse_blocks = 2, c.sparse_size = 4;
        config_json_write(path, &c, plain ? DTYPE_F32 : DTYPE_BF16);
        size_t size = 0;
        char *text = ckpt_read_file(path, &size);
        EXPECT(strcmp(text, cases[i].text) == 0, "config.json is\n%s", text);
        free(text);
        ModelConfig back = config_json_read(d.path);
        EXPECT(back.attention == c.attention && back.V == c.V && back.C == c.C && back.L == c.L && back.NH == c.NH &&
                   back.NKV == c.NKV && back.D == c.D && back.F == c.F && back.T == c.T &&
                   back.rope_theta == c.rope_theta && back.rms_norm_eps == c.rms_norm_eps && back.tied == c.tied &&
                   back.window == c.window && back.full_every == c.full_every && back.yoco == c.yoco &&
                   back.sparse_blocks == c.sparse_blocks && back.sparse_size == (sparse ? 4 : 64) &&
                   back.qk_norm == c.qk_norm && back.parametrization == c.parametrization &&
                   back.base_width == c.base_width && back.base_depth == c.base_depth,
               "the configuration of %s came back otherwise", c.attention->name);
    }
}

// A Llama's configuration with `more` members; "KEY" in `without` is left out.
static void ckpt_write_config(const char *directory, const char *without, const char *more) {
    static const char *const members[] = {"\"model_type\": \"llama\"",
                                          "\"vocab_size\": 32",
                                          "\"hidden_size\": 64",
                                          "\"num_hidden_layers\": 2",
                                          "\"num_attention_heads\": 4",
                                          "\"intermediate_size\": 128",
                                          "\"max_position_embeddings\": 64",
                                          "\"architectures\": [\"LlamaForCausalLM\"]",
                                          "\"use_cache\": true"};
    char text[2048] = "{";
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++)
        if (!*without || !strstr(members[i], without)) {
            if (text[1]) strcat(text, ", ");
            strcat(text, members[i]);
        }
    if (*more) strcat(strcat(text, ", "), more);
    strcat(text, "}");
    test_write_text(test_text("%s/config.json", directory), text);
}

#define MINISTRAL "\"model_type\": \"ministral\", \"num_key_value_heads\": null"
#define QWEN3 "\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, \"head_dim\": 8"
#define QWEN3_WINDOW QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": 8"
#define EXPERTS_OF(E, K) "\"attention\": \"sink\", \"num_local_experts\": " E ", \"num_experts_per_tok\": " K
#define MIXTRAL_WITHOUT "\"model_type\": \"mixtral\", \"num_key_value_heads\": null"
#define MIXTRAL MIXTRAL_WITHOUT ", \"rope_theta\": 1e6, \"rms_norm_eps\": 1e-5"
static void test_config_defaults(void) {
    static const struct {
        const char *without, *more, *want;
    } cases[] = {
        {"", "", "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"",
         "\"num_key_value_heads\": 2, \"head_dim\": 32, \"rope_theta\": 500000.0, \"rms_norm_eps\": 1e-5, "
         "\"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\"",
         "baseline C 64 NH 4 NKV 2 D 32 theta 500000 eps 1e-05 tied 1\n"},
        {"",
         "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 20000}, \"dtype\": \"float16\", "
         "\"rope_scaling\": null, \"head_dim\": null, \"sliding_window\": null, \"attention_dropout\": 0.0, "
         "\"hidden_act\": \"silu\", \"attention_bias\": false, \"mlp_bias\": false",
         "baseline C 64 NH 4 NKV 4 D 16 theta 20000 eps 1e-06 tied 0\n"},
        {"", "\"rope_scaling\": {\"type\": \"default\", \"rope_theta\": 500}",
         "baseline C 64 NH 4 NKV 4 D 16 theta 500 eps 1e-06 tied 0\n"},
        {"", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 1.0}, \"rope_theta\": 5",
         "baseline C 64 NH 4 NKV 4 D 16 theta 5 eps 1e-06 tied 0\n"},
        {"model_type", "\"attention\": \"diff_v2\"", "diff_v2 C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", "\"model_type\": \"gpt2\", \"attention\": \"baseline\"",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 0\n"},
        {"model_type", "\"model_type\": \"mistral\", \"num_key_value_heads\": 2, \"sliding_window\": 8",
         "baseline C 64 NH 4 NKV 2 D 16 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": null",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", "\"attention\": \"sink\", \"sliding_window\": 8, \"yoco\": true",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 1\n"},
        {"model_type", "\"attention\": \"sink\", \"use_qk_norm\": true",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"", "\"use_qk_norm\": false", "baseline C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        // with the keys of the smallest published Qwen3; the class ignores a window that is not switched on
        {"model_type",
         QWEN3 ", \"attention_bias\": false, \"attention_dropout\": 0.0, \"bos_token_id\": 1, \"eos_token_id\": 2, "
               "\"hidden_act\": \"silu\", \"initializer_range\": 0.02, \"max_window_layers\": 28, "
               "\"rms_norm_eps\": 1e-06, \"rope_scaling\": null, \"rope_theta\": 1000000, \"sliding_window\": null, "
               "\"tie_word_embeddings\": true, \"torch_dtype\": \"bfloat16\", \"use_sliding_window\": false",
         "baseline C 64 NH 4 NKV 2 D 8 theta 1e+06 eps 1e-06 tied 1, qk-norm\n"},
        {"model_type", QWEN3 ", \"sliding_window\": 4096, \"layer_types\": [\"full_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 2",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 0",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, window 8, full every 0, yoco 0, qk-norm\n"},
        {"model_type",
         QWEN3_WINDOW ", \"max_window_layers\": 1, \"layer_types\": [\"sliding_attention\", \"full_attention\"]",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, window 8, full every 2, yoco 0, qk-norm\n"},
        {"model_type", QWEN3 ", \"use_sliding_window\": true, \"sliding_window\": null, \"use_qk_norm\": true",
         "baseline C 64 NH 4 NKV 2 D 8 theta 10000 eps 1e-06 tied 0, qk-norm\n"},
        {"model_type",
         "\"attention\": \"sink\", \"num_shared_experts\": 0, \"num_dense_layers\": 0, \"router_bias\": false",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0\n"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_shared_experts\": 0, \"num_dense_layers\": 0",
         "sink C 64 NH 4 NKV 4 D 16 theta 10000 eps 1e-06 tied 0, 2 of 4 experts of 128\n"},
        // the class has other defaults of theta and eps, which must be there; those of experts need not
        {"model_type", MIXTRAL, "baseline C 64 NH 4 NKV 4 D 16 theta 1e+06 eps 1e-05 tied 0, 2 of 8 experts of 128\n"},
        {"model_type", MIXTRAL ", \"num_local_experts\": 3, \"num_experts_per_tok\": 1, \"sliding_window\": 8",
         "baseline C 64 NH 4 NKV 4 D 16 theta 1e+06 eps 1e-05 tied 0, window 8, full every 0, yoco 0, 1 of 3 experts "
         "of "
         "128\n"},
        {"model_type", MIXTRAL_WITHOUT ", \"rms_norm_eps\": 1e-6, \"rope_parameters\": {\"rope_theta\": 7}",
         "baseline C 64 NH 4 NKV 4 D 16 theta 7 eps 1e-06 tied 0, 2 of 8 experts of 128\n"},
    };
    TestDirectory d = test_make_directory();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_config(d.path, cases[i].without, cases[i].more);
        ckpt_accepted("config", d.path, "", cases[i].want);
    }
}

static void test_config_refusals(void) {
    static const struct {
        const char *without, *more, *word;
    } cases[] = {
        {"", "\"rope_scaling\": {\"rope_type\": \"llama3\"}", "rope_scaling has rope_type = \"llama3\""},
        {"", "\"rope_scaling\": {\"type\": \"linear\"}", "rope_scaling has type = \"linear\""},
        {"", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 1}", "rope_scaling has type = \"dynamic\""},
        {"", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}", "rope_scaling has type = \"linear\""},
        {"", "\"rope_scaling\": \"linear\"", "rope_scaling is \"linear\"; it must be an object"},
        {"", "\"rope_scaling\": {\"rope_theta\": 1}, \"rope_theta\": 2", "rope_theta is 2, but 1 in rope_scaling"},
        {"", "\"rope_parameters\": {\"rope_type\": \"yarn\"}", "rope_type = \"yarn\""},
        {"", "\"rope_parameters\": {\"factor\": 8}", "factor = 8"},
        {"", "\"rope_parameters\": 5", "rope_parameters is 5"},
        {"", "\"rope_parameters\": {\"partial_rotary_factor\": 0.5}", "partial_rotary_factor = 0.5"},
        {"", "\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 2e4}",
         "rope_theta is 10000, but 20000 in rope_parameters"},
        {"", "\"rope_theta\": 1e999", "must be a finite number"},
        {"", "\"rope_theta\": \"10000\"", "rope_theta is \"10000\""},
        {"", "\"attention_bias\": true", "attention_bias is true"},
        {"", "\"mlp_bias\": true", "mlp_bias is true"},
        {"", "\"hidden_act\": \"gelu\"", "hidden_act is \"gelu\""},
        {"", "\"sliding_window\": 4096", "sliding_window is 4096"},
        {"model_type", MINISTRAL, "the key sliding_window is missing"},
        {"model_type", "\"model_type\": \"ministral\", \"sliding_window\": 8",
         "the key num_key_value_heads is missing"},
        {"model_type", MINISTRAL ", \"sliding_window\": 0", "sliding_window is 0"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": \"full_attention\"", "layer_types is"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\"]", "layer_types is"},
        {"model_type",
         MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type",
         MINISTRAL ", \"sliding_window\": 8, \"layer_types\": [\"chunked_attention\", \"full_attention\"]",
         "layer_types has \"chunked_attention\""},
        {"", "\"layer_types\": [\"sliding_attention\", \"full_attention\"]", "there is no sliding_window"},
        {"model_type",
         "\"attention\": \"sink\", \"yoco\": true, \"sliding_window\": 8, \"layer_types\": [\"sliding_attention\", "
         "\"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type", "\"attention\": \"sink\", \"yoco\": 1, \"sliding_window\": 8", "yoco is 1"},
        {"", "\"sparse_blocks\": 1", "a model with it has the key attention"},
        {"", "\"layer_types\": [\"full_attention\", null]", "layer_types has null; supported are"},
        {"", "\"use_qk_norm\": true",
         "use_qk_norm is true, but model_type is \"llama\", which does not have this norm"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"use_qk_norm\": true",
         "use_qk_norm is true, but model_type is \"ministral\""},
        {"model_type", QWEN3 ", \"use_qk_norm\": false",
         "use_qk_norm is false, but model_type is \"qwen3\", which always has this norm"},
        {"", "\"use_qk_norm\": 1", "use_qk_norm is 1; it must be true or false"},
        {"model_type", "\"model_type\": \"qwen3\", \"head_dim\": 8",
         "the key num_key_value_heads is missing, and model_type is \"qwen3\""},
        {"model_type", "\"model_type\": \"qwen3\", \"num_key_value_heads\": 2", "the key head_dim is missing"},
        {"model_type", QWEN3 ", \"attention_bias\": true", "attention_bias is true"},
        {"model_type", QWEN3 ", \"use_sliding_window\": 1", "use_sliding_window is 1; it must be true or false"},
        {"model_type", QWEN3 ", \"use_sliding_window\": true", "the key sliding_window is missing"},
        {"model_type", QWEN3_WINDOW, "one of the keys layer_types and max_window_layers is required"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": 1",
         "max_window_layers is 1; supported are 0 (every layer has a window) and 2 or more"},
        {"model_type", QWEN3_WINDOW ", \"max_window_layers\": -1", "max_window_layers is -1"},
        {"model_type", QWEN3 ", \"sliding_window\": 8, \"layer_types\": [\"sliding_attention\", \"sliding_attention\"]",
         "layer_types has \"sliding_attention\", but there is no sliding_window with use_sliding_window true"},
        {"model_type", QWEN3_WINDOW ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]",
         "layer_types: layer 1"},
        {"model_type", MINISTRAL ", \"sliding_window\": true", "sliding_window is true; it must be an integer"},
        {"model_type", MINISTRAL ", \"sliding_window\": 20000000", "a dimension is too large"},
        {"model_type", MINISTRAL ", \"sliding_window\": 8, \"yoco\": true", "a model with it has the key attention"},
        {"num_hidden_layers", "\"num_hidden_layers\": 2147483647, \"layer_types\": [\"full_attention\"]",
         "each of the 2147483647 layers"},
        {"num_hidden_layers", "\"num_hidden_layers\": 2147483647", "a dimension is too large"},
        {"", "\"attention_dropout\": 0.1", "attention_dropout is 0.1"},
        {"", "\"quantization_config\": {}", "quantization_config is {}"},
        {"", "\"partial_rotary_factor\": 0.5", "partial_rotary_factor is 0.5"},
        {"", "\"num_local_experts\": 8", "num_local_experts is 8"},
        {"model_type", MIXTRAL_WITHOUT ", \"rope_theta\": 1e6", "the key rms_norm_eps is missing"},
        {"model_type", MIXTRAL_WITHOUT ", \"rms_norm_eps\": 1e-5",
         "the key rope_theta is missing, and model_type is \"mixtral\""},
        {"model_type", "\"attention\": \"sink\", \"parametrization\": \"mup\"",
         "parametrization is \"mup\"; supported are \"standard\" and \"completep\""},
        {"model_type", "\"attention\": \"sink\", \"parametrization\": \"completep\"",
         "completep requires a base width"},
        {"model_type", MIXTRAL ", \"num_experts_per_tok\": 9",
         "from 1 to 8 active experts, the number of experts, not 9"},
        {"model_type", MIXTRAL ", \"num_shared_experts\": 1", "model_type is \"mixtral\", which does not have it"},
        {"model_type", MIXTRAL ", \"router_bias\": true", "model_type is \"mixtral\", which has no such bias"},
        {"model_type", MIXTRAL ", \"router_jitter_noise\": 0.1", "router_jitter_noise is 0.1"},
        {"model_type", MIXTRAL ", \"layer_types\": [\"full_attention\", \"full_attention\"]", "which ignores it"},
        {"model_type", MIXTRAL ", \"use_qk_norm\": true", "use_qk_norm is true, but model_type is \"mixtral\""},
        {"model_type", "\"attention\": \"sink\", \"num_experts_per_tok\": 2", "requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"router_bias\": true", "router_bias requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"num_shared_experts\": 1",
         "num_shared_experts requires num_local_experts"},
        {"model_type", "\"attention\": \"sink\", \"num_dense_layers\": -1",
         "num_dense_layers is -1; it must be an integer from 0"},
        {"model_type", EXPERTS_OF("4", "2") ", \"router_bias\": 1", "router_bias is 1; it must be true or false"},
        {"model_type", EXPERTS_OF("0", "1"), "num_local_experts is 0; it must be an integer from 1"},
        {"model_type", EXPERTS_OF("-1", "1"), "num_local_experts is -1"},
        {"model_type", EXPERTS_OF("1e10", "1"), "num_local_experts is 10000000000"},
        {"model_type", EXPERTS_OF("2000000", "1"), "2 layers of 2000000 experts are more"},
        {"model_type", EXPERTS_OF("2000", "1"), "at most 1024 experts, not 2000"},
        {"model_type", EXPERTS_OF("128", "65"), "at most 64 active experts, not 65"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_shared_experts\": 1000000", "are too wide"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_dense_layers\": 1", "dense_intermediate_size is missing"},
        {"model_type", EXPERTS_OF("4", "2") ", \"num_dense_layers\": 2, \"dense_intermediate_size\": 8",
         "dense layers: 2 leave no layer with experts"},
        {"", "\"attention\": 2", "attention is 2; supported are"},
        {"model_type", "\"model_type\": \"gpt2\"",
         "model_type is \"gpt2\"; without the key attention it must be one of "
         "llama, ministral, mistral, qwen3, mixtral"},
        {"model_type", "", "the key model_type is missing"},
        {"vocab_size", "", "the key vocab_size is missing"},
        {"hidden_size", "", "the key hidden_size is missing"},
        {"num_hidden_layers", "", "the key num_hidden_layers is missing"},
        {"num_attention_heads", "", "the key num_attention_heads is missing"},
        {"intermediate_size", "", "the key intermediate_size is missing"},
        {"max_position_embeddings", "", "the key max_position_embeddings is missing"},
        {"vocab_size", "\"vocab_size\": 32.5", "vocab_size is 32.5"},
        {"vocab_size", "\"vocab_size\": \"32\"", "vocab_size is \"32\""},
        {"vocab_size", "\"vocab_size\": 1e10", "vocab_size is 10000000000"},
        {"vocab_size", "\"vocab_size\": null", "the key vocab_size is missing"},
        {"hidden_size", "\"hidden_size\": 65", "the key head_dim is missing"},
        {"", "\"hidden_size\": 64", "duplicate key hidden_size"},
        {"", "\"num_key_value_heads\": 3", "not a multiple of 3 key/value heads"},
        {"", "\"head_dim\": 7", "head dimension must be even"},
        {"", "\"rope_parameters\": {\"a\\nb\": 1}", "has a key = 1"},
        {"", "\"rms_norm_eps\": NaN}", "config.json is not valid JSON from byte 243: NaN}}"},
        {"", "\"head_dim\": 8} x", "config.json has more than a JSON value, from byte 242: x}"},
        {"", "x", "config.json is not valid JSON from byte"},
    };
    TestDirectory d = test_make_directory();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckpt_write_config(d.path, cases[i].without, cases[i].more);
        ckpt_refused("config", d.path, "", cases[i].word); // no message names an option, which nobody has given
        EXPECT(!strstr(ckpt_refusal, "--"), "%s", ckpt_refusal);
    }
    static const char *const texts[][2] = {
        {"", "config.json is empty"}, {" \n", "is empty"}, {"[]", "is not a JSON object"}};
    for (int i = 0; i < 3; i++) {
        test_write_text(test_text("%s/config.json", d.path), texts[i][0]);
        ckpt_refused("config", d.path, "", texts[i][1]);
    }
#undef MINISTRAL
#undef QWEN3
#undef QWEN3_WINDOW
#undef MIXTRAL
#undef MIXTRAL_WITHOUT
    ckpt_refused("config", test_text("%s/none", d.path), "", "none/config.json: No such file");
}

static const Test config_json_tests[] = {
    {"numbers written to JSON are read back bit for bit", test_json_numbers},
    {"strings in JSON are escaped and are UTF-8", test_json_strings},
    {"config.json has its keys in a fixed order and is read back unchanged", test_config_round_trip},
    {"a Llama's config.json is read with Llama's defaults", test_config_defaults},
    {"a config.json of an unsupported model is rejected with the key and value", test_config_refusals},
};
