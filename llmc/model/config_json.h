/*
config_json.h: the architecture of a model as config.json, in the format of Hugging Face's Transformers.

  void        config_json_write(path, config, dtype)   atomic; `dtype` is that of the weights beside it
  ModelConfig config_json_read(directory)              from DIRECTORY/config.json, complete and checked. Exits with one
                                                       line that names the key and its value

  format   One object, with keys in the order of config_json_build. The key "attention" names the variant. A baseline is
           a Llama, or with windows above 1 a Ministral, and is written as one, without "attention", so that other
           programs can load it. Windows are "sliding_window" and "layer_types"; "yoco" is true or missing.
  reading  The variant is "attention" if present; otherwise model_type must be "llama" or "ministral". A key for a
           feature that this model does not have must have the value that disables it (absent_features), otherwise the
           file is rejected. Other keys are ignored. null is the same as a missing key. Defaults are those of Llama
           configurations: num_key_value_heads = num_attention_heads, head_dim = hidden_size / num_attention_heads,
           rope_theta 10000 (at the top level or in rope_parameters), rms_norm_eps 1e-6, tie_word_embeddings false.
           rope_parameters and rope_scaling must not scale angles. A Ministral must have the keys whose defaults in its
           class differ from these: sliding_window (4096) and num_key_value_heads (8); without layer_types, all its
           layers have the window.
*/
#ifndef LLMC_CONFIG_JSON_H
#define LLMC_CONFIG_JSON_H
#include "../base/common.h"
#include "../base/dtype.h"
#include "../base/files.h"
#include "../base/json.h"
#include "model_config.h"

static const char *const layer_type_names[] = {"sliding_attention", "full_attention"};
static inline bool config_json_add_windows(cJSON *o, const ModelConfig *c) {
    bool ok = cJSON_AddNumberToObject(o, "sliding_window", c->window) != NULL;
    cJSON *types = cJSON_AddArrayToObject(o, "layer_types");
    for (int l = 0; l < c->L; l++)
        ok = ok && cJSON_AddItemToArray(types, cJSON_CreateString(layer_type_names[layer_window(c, l) == 0]));
    return ok;
}

static inline cJSON *config_json_build(const ModelConfig *c, DType dtype) {
    // with a window of 1, Ministral's cache keeps all positions (Transformers 5.23.0, DynamicSlidingWindowLayer)
    bool foreign = c->attention == variant_find("baseline") && !c->yoco && c->window != 1;
    bool ministral = foreign && c->window;
    cJSON *o = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(o, "architectures");
    const char *class_name = ministral ? "MinistralForCausalLM" : foreign ? "LlamaForCausalLM" : "DiffV2ForCausalLM";
    const char *type = ministral ? "ministral" : foreign ? "llama" : "diffv2";
    bool ok =
        cJSON_AddItemToArray(list, cJSON_CreateString(class_name)) && cJSON_AddStringToObject(o, "model_type", type);
    if (!foreign) ok = ok && cJSON_AddStringToObject(o, "attention", c->attention->name);
    ok = ok && cJSON_AddNumberToObject(o, "vocab_size", c->V) && cJSON_AddNumberToObject(o, "hidden_size", c->C) &&
         cJSON_AddNumberToObject(o, "num_hidden_layers", c->L) &&
         cJSON_AddNumberToObject(o, "num_attention_heads", c->NH) &&
         cJSON_AddNumberToObject(o, "num_key_value_heads", c->NKV) && cJSON_AddNumberToObject(o, "head_dim", c->D) &&
         cJSON_AddNumberToObject(o, "intermediate_size", c->F) &&
         cJSON_AddNumberToObject(o, "max_position_embeddings", c->T) &&
         cJSON_AddNumberToObject(o, "rope_theta", c->rope_theta) &&
         cJSON_AddNumberToObject(o, "rms_norm_eps", c->rms_norm_eps) &&
         cJSON_AddBoolToObject(o, "tie_word_embeddings", c->tied) &&
         cJSON_AddStringToObject(o, "torch_dtype", dtype_table[dtype].torch_name);
    if (c->window) ok = ok && config_json_add_windows(o, c);
    if (c->yoco) ok = ok && cJSON_AddTrueToObject(o, "yoco");
    if (foreign) // defaults that a reader might assume otherwise; Llama's tokens 1 and 2 have no special meaning here
        ok = ok && cJSON_AddStringToObject(o, "hidden_act", "silu") && cJSON_AddFalseToObject(o, "attention_bias") &&
             cJSON_AddFalseToObject(o, "mlp_bias") && cJSON_AddNullToObject(o, "bos_token_id") &&
             cJSON_AddNullToObject(o, "eos_token_id");
    CHECK(ok, "out of memory for config.json");
    return o;
}

static inline void config_json_write(const char *path, const ModelConfig *c, DType dtype) {
    cJSON *object = config_json_build(c, dtype);
    size_t size = 0;
    char *text = json_text(object, &size);
    file_write_atomic(path, text, size);
    free(text);
    cJSON_Delete(object);
}

// Keys of features that this model does not have, with the JSON value that disables them; null always does.
static const struct {
    const char *key, *absent;
} absent_features[] = {
    {"quantization_config", "null"}, {"num_local_experts", "null"}, {"attention_bias", "false"},
    {"mlp_bias", "false"},           {"hidden_act", "\"silu\""},    {"attention_dropout", "0"},
    {"partial_rotary_factor", "1"},
};
enum { ABSENT_FEATURE_COUNT = sizeof(absent_features) / sizeof(absent_features[0]) };

typedef struct {
    const char *path;
    const cJSON *object;
} ConfigReader;

// A JSON value as text for a message.
typedef struct {
    char text[80];
} ConfigValueText;
static inline ConfigValueText config_value_text(const cJSON *item) {
    ConfigValueText b;
    json_brief(item, b.text, sizeof(b.text));
    return b;
}

// The value of a key; NULL if it is missing or null.
static inline const cJSON *config_item(const ConfigReader *r, const char *key) {
    const cJSON *found = NULL;
    for (const cJSON *e = r->object->child; e; e = e->next) {
        if (strcmp(e->string, key) != 0) continue;
        CHECK(!found, "%s: duplicate key %s", r->path, key);
        found = e;
    }
    return cJSON_IsNull(found) ? NULL : found;
}

// fallback 0: the key is required.
static inline int config_int(const ConfigReader *r, const char *key, int fallback) {
    const cJSON *item = config_item(r, key);
    CHECK(item || fallback, "%s: the key %s is missing", r->path, key);
    if (!item) return fallback;
    uint64_t value = 0;
    CHECK(json_size(item, &value) && value >= 1 && value <= INT_MAX, "%s: %s is %s; it must be an integer from 1 to %d",
          r->path, key, config_value_text(item).text, INT_MAX);
    return (int)value;
}

static inline double config_number(const ConfigReader *r, const char *key, double fallback) {
    const cJSON *item = config_item(r, key);
    if (!item) return fallback;
    CHECK(cJSON_IsNumber(item) && isfinite(item->valuedouble), "%s: %s is %s; it must be a number", r->path, key,
          config_value_text(item).text);
    return item->valuedouble;
}

static inline bool config_bool(const ConfigReader *r, const char *key, bool fallback) {
    const cJSON *item = config_item(r, key);
    CHECK(!item || cJSON_IsBool(item), "%s: %s is %s; it must be true or false", r->path, key,
          config_value_text(item).text);
    return item ? cJSON_IsTrue(item) : fallback;
}

static inline void config_refuse_features(const ConfigReader *r) {
    for (int i = 0; i < ABSENT_FEATURE_COUNT; i++) {
        const cJSON *item = config_item(r, absent_features[i].key);
        cJSON *absent = cJSON_Parse(absent_features[i].absent);
        CHECK(!item || cJSON_Compare(item, absent, true), "%s: %s is %s; this program supports only %s", r->path,
              absent_features[i].key, config_value_text(item).text, absent_features[i].absent);
        cJSON_Delete(absent);
    }
}

static inline bool config_is_type(const ConfigReader *r, const char *name) {
    const cJSON *type = config_item(r, "model_type");
    return cJSON_IsString(type) && strcmp(type->valuestring, name) == 0;
}

static inline const AttentionVariant *config_attention(const ConfigReader *r) {
    const cJSON *attention = config_item(r, "attention"), *type = config_item(r, "model_type");
    if (!attention) {
        CHECK(type,
              "%s: the key model_type is missing; supported are \"llama\" and \"ministral\", and models with the key "
              "attention",
              r->path);
        CHECK(config_is_type(r, "llama") || config_is_type(r, "ministral"),
              "%s: model_type is %s; without the key attention only \"llama\" and \"ministral\" are supported", r->path,
              config_value_text(type).text);
        return variant_find("baseline");
    }
    const AttentionVariant *v = cJSON_IsString(attention) ? variant_find(attention->valuestring) : NULL;
    char known[1024] = "";
    for (int i = 0; i < ATTENTION_VARIANT_COUNT; i++) {
        size_t length = strlen(known);
        snprintf(known + length, sizeof(known) - length, "%s%s", i ? ", " : "", attention_variants[i].name);
    }
    CHECK(v, "%s: attention is %s; supported are %s", r->path, config_value_text(attention).text, known);
    return v;
}

// Checks an object that describes the scaling of angles: there must be none. Returns its rope_theta, or NAN.
static inline double config_unscaled_rope(const ConfigReader *r, const char *key) {
    const cJSON *rope = config_item(r, key);
    if (!rope) return NAN;
    CHECK(cJSON_IsObject(rope), "%s: %s is %s; it must be an object", r->path, key, config_value_text(rope).text);
    for (const cJSON *e = rope->child; e; e = e->next) {
        if (strcmp(e->string, "rope_theta") == 0 || cJSON_IsNull(e)) continue;
        bool type = strcmp(e->string, "rope_type") == 0 || strcmp(e->string, "type") == 0;
        bool full = strcmp(e->string, "partial_rotary_factor") == 0 && e->valuedouble == 1;
        CHECK(full || (type && cJSON_IsString(e) && strcmp(e->valuestring, "default") == 0),
              "%s: %s has %s = %s; only rope_type \"default\" is supported", r->path, key,
              printable(e->string) ? e->string : "a key", config_value_text(e).text);
    }
    ConfigReader inner;
    inner.path = r->path;
    inner.object = rope;
    return config_number(&inner, "rope_theta", NAN);
}

// rope_theta, or the newer {"rope_parameters": {"rope_type": "default", "rope_theta": ...}}, formerly rope_scaling.
static inline double config_rope_theta(const ConfigReader *r) {
    const char *const objects[] = {"rope_parameters", "rope_scaling"};
    double theta = config_number(r, "rope_theta", NAN);
    for (int i = 0; i < 2; i++) {
        double inside = config_unscaled_rope(r, objects[i]);
        CHECK(isnan(theta) || isnan(inside) || inside == theta, "%s: rope_theta is %g, but %g in %s", r->path, theta,
              inside, objects[i]);
        if (!isnan(inside)) theta = inside;
    }
    return isnan(theta) ? 10000 : theta;
}

// Whether a layer attends to all positions, by its entry in layer_types.
static inline bool config_layer_is_full(const ConfigReader *r, const cJSON *type) {
    for (int full = 0; full < 2; full++)
        if (cJSON_IsString(type) && strcmp(type->valuestring, layer_type_names[full]) == 0) return full;
    CHECK(false, "%s: layer_types has %s; supported are \"%s\" and \"%s\"", r->path, config_value_text(type).text,
          layer_type_names[0], layer_type_names[1]);
    return false;
}

// Sets window and full_every from layer_types. A model that has a window and no layer_types has it in every layer.
static inline void config_read_layer_types(const ConfigReader *r, const cJSON *types, ModelConfig *c) {
    bool *full = (bool *)checked_calloc(c->L, sizeof(bool));
    const cJSON *type = types->child;
    int upper = c->yoco ? c->L / 2 : c->L, first = upper; // first: the first layer that attends to all positions
    for (int l = 0; l < c->L; l++, type = type->next) {
        full[l] = config_layer_is_full(r, type);
        CHECK(c->window || full[l], "%s: layer_types has \"%s\", but there is no sliding_window", r->path,
              layer_type_names[0]);
        if (full[l]) first = min_int(first, l);
    }
    if (first == 0) c->window = 0; // no layer that the window applies to
    if (c->window && first < upper) c->full_every = first + 1;
    for (int l = 0; l < c->L; l++)
        CHECK(full[l] == (layer_window(c, l) == 0),
              "%s: layer_types: layer %d is not as the others say; supported are windows in every layer, or in all but "
              "every K-th layer",
              r->path, l);
    free(full);
}

// sliding_window, layer_types and yoco. A key that the class of model_type ignores is rejected.
static inline void config_read_windows(const ConfigReader *r, ModelConfig *c) {
    const cJSON *types = config_item(r, "layer_types"), *window = config_item(r, "sliding_window");
    const char *const required[] = {"sliding_window", "num_key_value_heads"}; // or null
    for (int i = 0; i < 2 && config_is_type(r, "ministral"); i++)
        CHECK(cJSON_GetObjectItemCaseSensitive(r->object, required[i]),
              "%s: the key %s is missing, and model_type is \"ministral\", which requires it", r->path, required[i]);
    c->window = window ? config_int(r, "sliding_window", 0) : 0;
    CHECK(!window || !config_is_type(r, "llama"),
          "%s: sliding_window is %s, but model_type is \"llama\", which has none", r->path,
          config_value_text(window).text);
    c->yoco = config_bool(r, "yoco", false);
    CHECK(!c->yoco || config_item(r, "attention"), "%s: yoco is true; a model with it has the key attention", r->path);
    CHECK(!types || (cJSON_IsArray(types) && cJSON_GetArraySize(types) == c->L),
          "%s: layer_types is %s; it must be an array with a name for each of the %d layers", r->path,
          config_value_text(types).text, c->L);
    if (types) config_read_layer_types(r, types, c);
}

static inline ModelConfig config_json_read(const char *directory) {
    char path[PATH_SIZE];
    size_t size = 0;
    FORMAT(path, "%s/config.json", directory);
    char *text = file_read(path, 16 << 20, &size);
    CHECK(text != NULL, "cannot read %s: %s; the directory must be a checkpoint with config.json", path,
          strerror(errno));
    CHECK(json_bounded(text, size), "%s has more than %d JSON values and cannot be the config.json of a model", path,
          (int)JSON_VALUE_LIMIT);
    cJSON *object = json_parse(text, size);
    free(text);
    CHECK(cJSON_IsObject(object), "%s is not a JSON object", path);
    ConfigReader reader, *r = &reader;
    r->path = path;
    r->object = object;

    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = config_attention(r);
    config_refuse_features(r);
    c.V = config_int(r, "vocab_size", 0);
    c.C = config_int(r, "hidden_size", 0);
    c.L = config_int(r, "num_hidden_layers", 0);
    c.NH = config_int(r, "num_attention_heads", 0);
    c.NKV = config_int(r, "num_key_value_heads", c.NH);
    c.D = config_int(r, "head_dim", c.C % c.NH == 0 ? c.C / c.NH : 0);
    c.F = config_int(r, "intermediate_size", 0);
    c.T = config_int(r, "max_position_embeddings", 0);
    c.rope_theta = config_rope_theta(r);
    c.rms_norm_eps = config_number(r, "rms_norm_eps", 1e-6);
    c.tied = config_bool(r, "tie_word_embeddings", false);
    config_read_windows(r, &c);
    const char *const dtype_keys[] = {"torch_dtype", "dtype"}; // informative only: each tensor states its type
    for (int k = 0; k < 2; k++) {
        const cJSON *item = config_item(r, dtype_keys[k]);
        bool known = !item;
        for (int t = 0; item && t < DTYPE_COUNT; t++)
            known = known || (cJSON_IsString(item) && strcmp(item->valuestring, dtype_table[t].torch_name) == 0);
        CHECK(known, "%s: %s is %s; supported are float32, bfloat16, float16 and float64", path, dtype_keys[k],
              config_value_text(item).text);
    }
    cJSON_Delete(object);
    Problem problem;
    CHECK(model_config_problems(&c, &problem, 1) == 0, "%s: %s", path, problem);
    return c;
}
#endif
