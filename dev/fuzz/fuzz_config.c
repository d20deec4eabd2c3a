/*
fuzz_config.c: config_json_read with a damaged config.json. An accepted model must be valid: its sizes are computed and
its tensors listed; writing it as config.json and reading that gives the same model.
*/
#include "fuzz.h"
#include "../../llmc/experts/all_operations.h"
#include "../../llmc/model/config_json.h"
#include "../../llmc/model/tensors.h"

const char fuzz_file[] = "config.json";

enum { LAYER_LIMIT = 64, EXPERT_LIMIT = 64 }; // the list of tensors grows with the layers and experts

void fuzz_prepare(void) {}

void fuzz_seeds(void) {
    for (int i = 0; i < ATTENTION_VARIANT_COUNT; i++) {
        ModelConfig c;
        memset(&c, 0, sizeof(c));
        c.attention = &attention_variants[i];
        c.V = 256, c.C = 64, c.L = 2, c.NH = 8, c.NKV = 2, c.D = 16, c.F = 172, c.T = 64;
        c.rope_theta = 10000, c.rms_norm_eps = 1e-5, c.tied = i % 2;
        c.window = 8 * (i % 3), c.full_every = i % 3 == 2 ? 2 : 0, c.yoco = i % 3 == 1;
        c.qk_norm = i % 4 == 1;
        if (i % 2) c.E = 8, c.K = 2, c.FE = 40, c.shared = i / 2 % 3, c.dense_layers = i / 2 % 2;
        c.router_bias = i % 4 == 3;
        if (i % 3 == 1) c.parametrization = PARAMETRIZATION_COMPLETEP, c.base_width = 32, c.base_depth = i % 2;
        cJSON *object = config_json_build(&c, DTYPE_F32);
        size_t size = 0;
        char *text = json_text(object, &size);
        fuzz_seed(c.attention->name, text, size);
        free(text);
        cJSON_Delete(object);
    }
    const char *newer = "{\"model_type\":\"llama\",\"vocab_size\":9,\"hidden_size\":16,\"num_hidden_layers\":1,"
                        "\"num_attention_heads\":2,\"intermediate_size\":8,\"max_position_embeddings\":4,\"dtype\":"
                        "\"bfloat16\",\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e5,"
                        "\"partial_rotary_factor\":1},\"rope_scaling\":null,\"attention_dropout\":0.0}";
    fuzz_seed("newer", newer, strlen(newer));
    const char *norm = "{\"attention\":\"sink\",\"vocab_size\":9,\"hidden_size\":16,\"num_hidden_layers\":1,"
                       "\"num_attention_heads\":2,\"intermediate_size\":8,\"max_position_embeddings\":4,"
                       "\"use_qk_norm\":true}";
    fuzz_seed("norm", norm, strlen(norm));
    for (int i = 0; i < FOREIGN_CLASS_COUNT; i++) {
        char text[512];
        FORMAT(text,
               "{\"model_type\":\"%s\",\"vocab_size\":9,\"hidden_size\":16,\"num_hidden_layers\":2,\"head_dim\":8,"
               "\"num_attention_heads\":2,\"num_key_value_heads\":null,\"intermediate_size\":8,"
               "\"max_position_embeddings\":4,\"rope_theta\":1000000,\"sliding_window\":%s,"
               "\"use_sliding_window\":true,\"max_window_layers\":0}",
               foreign_classes[i].type, foreign_classes[i].windows ? "2" : "null");
        fuzz_seed(foreign_classes[i].type, text, strlen(text));
    }
}

static void check_sizes(const ModelConfig *c) {
    AttentionDims a = attention_dims(c, false);
    FUZZ_EXPECT(a.OH > 0 && a.DV > 0 && a.NQ > 0 && a.QD > 0 && a.NK > 0 && a.NV > 0, "a size is not positive");
    FUZZ_EXPECT(a.NQ % a.NK == 0 || a.NK % a.NV == 0, "query heads do not divide among key heads");
    FUZZ_EXPECT(a.QD % 2 == 0 && (int64_t)a.OH * a.DV == (int64_t)c->NH * c->D, "heads do not add up");
    FUZZ_EXPECT(a.fused_rows > 0 && a.fused_ld >= a.fused_rows, "%d rows with stride %d", a.fused_rows, a.fused_ld);
    AttentionDims cross = attention_dims(c, true);
    FUZZ_EXPECT(cross.k_rows == 0 && cross.v_rows == 0 && cross.fused_rows + cross.kv_rows == a.fused_rows,
                "a layer without keys has %d rows of %d", cross.fused_rows, a.fused_rows);
    if (c->L > LAYER_LIMIT || c->E > EXPERT_LIMIT) return;
    for (int l = 0; l < c->L; l++)
        FUZZ_EXPECT(!layer_cross(c, l) || layer_window(c, l) == 0, "layer %d of the upper half has a window", l);
    for (int ranks = 1; ranks <= 3; ranks++) {
        TensorList list = tensor_list_build(c, ranks);
        FUZZ_EXPECT(list.parameter_count <= list.buffer_count, "more parameters than room for them, with %d ranks",
                    ranks);
        tensor_list_free(&list);
    }
}

void fuzz_large(void) {
    fuzz_large_text("one array", "{\"a\": [", "0,", "0]}", 16 << 20);
    fuzz_large_text("keys", "{\"model_type\": \"llama\"", ",\"a\":0", "}", 8 << 20);
    fuzz_large_text("a value for a message", "{\"model_type\": [", "1e9,", "0]}", 4 << 20);
}

void fuzz_one(const uint8_t *data, size_t size) {
    (void)data, (void)size;
    ModelConfig c = config_json_read(fuzz_directory());
    check_sizes(&c);

    char path[PATH_SIZE], again[PATH_SIZE];
    FORMAT(again, "%s/again", fuzz_directory());
    FORMAT(path, "%s/config.json", again);
    directory_create(again);
    config_json_write(path, &c, DTYPE_F32);
    ModelConfig d = config_json_read(again);
    FUZZ_EXPECT(c.attention == d.attention && c.V == d.V && c.C == d.C && c.L == d.L && c.NH == d.NH &&
                    c.NKV == d.NKV && c.D == d.D && c.F == d.F && c.T == d.T && c.rope_theta == d.rope_theta &&
                    c.rms_norm_eps == d.rms_norm_eps && c.tied == d.tied && c.window == d.window &&
                    c.full_every == d.full_every && c.yoco == d.yoco && c.qk_norm == d.qk_norm && c.E == d.E &&
                    c.K == d.K && c.FE == d.FE && c.shared == d.shared && c.dense_layers == d.dense_layers &&
                    c.router_bias == d.router_bias && c.parametrization == d.parametrization &&
                    c.base_width == d.base_width && c.base_depth == d.base_depth,
                "what was written is not what was read");
}
