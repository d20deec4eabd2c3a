/*
config_json.h: the architecture of a model as config.json, in the format of Hugging Face's Transformers.

  void        config_json_write(path, config, dtype)   `dtype`: type of the weights beside it
  ModelConfig config_json_read(directory)              from DIRECTORY/config.json, complete and checked. Exits with one
                                                       line that names the key and its value

  format   One object, with keys in the order of config_json_build. The key "attention" names the variant. A baseline
           is written as the first of foreign_classes that has its features, without "attention", so that other programs
           can load it; no class has YOCO, a window of 1, shared experts or dense layers. Windows are
           "sliding_window" and "layer_types"; "yoco" and "use_qk_norm" are true or missing. Block-sparse models
           have "sparse_blocks", "sparse_block_size" and "full_every". With experts
           "intermediate_size" is the width of one; num_dense_layers layers have dense_intermediate_size.
  reading  The variant is "attention" if present; otherwise model_type must be one of foreign_classes. A key for a
           feature that this model does not have must have the value that disables it (absent_features), otherwise the
           file is rejected. Other keys are ignored. null is the same as a missing key. Defaults as in Llama
           configurations: num_key_value_heads = num_attention_heads, head_dim = hidden_size / num_attention_heads,
           rope_theta 10000 (at the top level or in rope_parameters), rms_norm_eps 1e-6, tie_word_embeddings false.
           rope_parameters and rope_scaling must not scale angles: type "default", or "linear" with factor 1.
           Where the class of model_type has another default, the key must be there.
  qwen3    Always normalizes queries and keys. Its windows apply if use_sliding_window is true; without layer_types,
           layers from max_window_layers on have the window. In a Ministral without layer_types all layers have it.
*/
#pragma once
#include "../base/common.h"
#include "../base/dtype.h"
#include "../base/files.h"
#include "../base/json.h"
#include "model_config.h"

// Classes of Transformers 5.24.0, with their defaults. All are read; one is written if it describes the model exactly.
typedef struct {
    const char *type, *class_name; // model_type, architectures
    bool windows, window_switch;   // has sliding_window (4096); reads it only if use_sliding_window (false) is true
    bool qk_norm;                  // normalizes queries and keys
    int kv_heads, head_dim;        // defaults that are not Llama's; 0: Llama's
    bool layer_types;              // reads layer_types; otherwise sliding_window holds for all layers
    int experts, active;           // has experts: its defaults of num_local_experts and num_experts_per_tok; else 0
    bool numbers;                  // its defaults of rope_theta and rms_norm_eps are not Llama's
} ForeignClass;
static const ForeignClass foreign_classes[] = {
    {"llama", "LlamaForCausalLM", false, false, false, 0, 0, false, 0, 0, false},
    {"ministral", "MinistralForCausalLM", true, false, false, 8, 0, true, 0, 0, false},
    {"mistral", "MistralForCausalLM", true, false, false, 8, 0, false, 0, 0, false},
    {"qwen3", "Qwen3ForCausalLM", true, true, true, 32, 128, true, 0, 0, false},
    {"mixtral", "MixtralForCausalLM", true, false, false, 8, 0, false, 8, 2, true}, // rope_theta 1e6, rms_norm_eps 1e-5
};
enum { FOREIGN_CLASS_COUNT = sizeof(foreign_classes) / sizeof(foreign_classes[0]) };

// The class that a model is written as; NULL: no class describes it.
static inline const ForeignClass *foreign_class_of(const ModelConfig *c) {
    // with a window of 1, the cache of these classes keeps all positions (DynamicSlidingWindowLayer)
    if (c->attention != variant_find("baseline") || c->yoco || c->window == 1) return NULL;
    if (c->shared || c->dense_layers || c->router_bias || c->sparse_blocks) return NULL;
    for (int i = 0; i < FOREIGN_CLASS_COUNT; i++) {
        const ForeignClass *f = &foreign_classes[i];
        bool windows = !c->window || (f->windows && (f->layer_types || !c->full_every));
        if (f->qk_norm == c->qk_norm && (f->experts > 0) == (c->E > 0) && windows) return f;
    }
    return NULL;
}

static const char *const layer_type_names[] = {"sliding_attention", "full_attention"};
static inline bool config_json_add_windows(cJSON *o, const ModelConfig *c, const ForeignClass *foreign) {
    bool ok = cJSON_AddNumberToObject(o, "sliding_window", c->window) != NULL;
    if (foreign && foreign->window_switch) // max_window_layers is for readers that do not know layer_types
        ok = ok && cJSON_AddTrueToObject(o, "use_sliding_window") && cJSON_AddNumberToObject(o, "max_window_layers", 0);
    if (foreign && !foreign->layer_types) return ok;
    cJSON *types = cJSON_AddArrayToObject(o, "layer_types");
    for (int l = 0; l < c->L; l++)
        ok = ok && cJSON_AddItemToArray(types, cJSON_CreateString(layer_type_names[layer_window(c, l) == 0]));
    return ok;
}

static inline bool config_json_add_experts(cJSON *o, const ModelConfig *c) {
    bool ok = cJSON_AddNumberToObject(o, "num_local_experts", c->E) &&
              cJSON_AddNumberToObject(o, "num_experts_per_tok", c->K);
    if (c->shared) ok = ok && cJSON_AddNumberToObject(o, "num_shared_experts", c->shared);
    if (c->router_bias) ok = ok && cJSON_AddTrueToObject(o, "router_bias");
    if (c->dense_layers)
        ok = ok && cJSON_AddNumberToObject(o, "num_dense_layers", c->dense_layers) &&
             cJSON_AddNumberToObject(o, "dense_intermediate_size", c->F);
    return ok;
}

// The model is the same with or without these keys: only its initial values and its update depend on them.
static inline bool config_json_add_parametrization(cJSON *o, const ModelConfig *c) {
    return cJSON_AddStringToObject(o, "parametrization", parametrization_names[c->parametrization]) &&
           cJSON_AddNumberToObject(o, "base_hidden_size", c->base_width) &&
           cJSON_AddNumberToObject(o, "base_num_hidden_layers", c->base_depth);
}

static inline cJSON *config_json_build(const ModelConfig *c, DType dtype) {
    const ForeignClass *foreign = foreign_class_of(c);
    cJSON *o = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(o, "architectures");
    bool ok = cJSON_AddItemToArray(list, cJSON_CreateString(foreign ? foreign->class_name : "DiffV2ForCausalLM")) &&
              cJSON_AddStringToObject(o, "model_type", foreign ? foreign->type : "diffv2");
    if (!foreign) ok = ok && cJSON_AddStringToObject(o, "attention", c->attention->name);
    ok = ok && cJSON_AddNumberToObject(o, "vocab_size", c->V) && cJSON_AddNumberToObject(o, "hidden_size", c->C) &&
         cJSON_AddNumberToObject(o, "num_hidden_layers", c->L) &&
         cJSON_AddNumberToObject(o, "num_attention_heads", c->NH) &&
         cJSON_AddNumberToObject(o, "num_key_value_heads", c->NKV) && cJSON_AddNumberToObject(o, "head_dim", c->D) &&
         cJSON_AddNumberToObject(o, "intermediate_size", c->E ? c->FE : c->F) &&
         cJSON_AddNumberToObject(o, "max_position_embeddings", c->T) &&
         cJSON_AddNumberToObject(o, "rope_theta", c->rope_theta) &&
         cJSON_AddNumberToObject(o, "rms_norm_eps", c->rms_norm_eps) &&
         cJSON_AddBoolToObject(o, "tie_word_embeddings", c->tied) &&
         cJSON_AddStringToObject(o, "torch_dtype", dtype_table[dtype].torch_name);
    if (c->E) ok = ok && config_json_add_experts(o, c);
    if (c->window) ok = ok && config_json_add_windows(o, c, foreign);
    if (c->yoco) ok = ok && cJSON_AddTrueToObject(o, "yoco");
    if (c->sparse_blocks)
        ok = ok && cJSON_AddNumberToObject(o, "sparse_blocks", c->sparse_blocks) &&
             cJSON_AddNumberToObject(o, "sparse_block_size", c->sparse_size) &&
             cJSON_AddNumberToObject(o, "full_every", c->full_every);
    if (c->qk_norm) ok = ok && cJSON_AddTrueToObject(o, "use_qk_norm");
    if (c->parametrization) ok = ok && config_json_add_parametrization(o, c);
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
    file_write_new(path, text, size);
    free(text);
    cJSON_Delete(object);
}

// Keys of features that this model does not have, with the JSON value that disables them; null disables each of them.
static const struct {
    const char *key, *absent;
} absent_features[] = {
    {"quantization_config", "null"}, {"attention_bias", "false"}, {"mlp_bias", "false"},
    {"hidden_act", "\"silu\""},      {"attention_dropout", "0"},  {"partial_rotary_factor", "1"},
    {"router_jitter_noise", "0"},
};
enum { ABSENT_FEATURE_COUNT = sizeof(absent_features) / sizeof(absent_features[0]) };

typedef struct {
    const char *path;
    const cJSON *object;
    const ForeignClass *foreign; // the class of model_type; NULL: model_type is unknown or missing
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

// A number of optional parts; 0 if the key is missing.
static inline int config_count(const ConfigReader *r, const char *key) {
    const cJSON *item = config_item(r, key);
    uint64_t value = 0;
    CHECK(!item || (json_size(item, &value) && value <= INT_MAX), "%s: %s is %s; it must be an integer from 0 to %d",
          r->path, key, config_value_text(item).text, INT_MAX);
    return (int)value;
}

static inline double config_number(const ConfigReader *r, const char *key, double fallback) {
    const cJSON *item = config_item(r, key);
    if (!item) return fallback;
    CHECK(cJSON_IsNumber(item) && isfinite(item->valuedouble), "%s: %s is %s; it must be a finite number", r->path, key,
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

// NULL if model_type is missing or unknown.
static inline const ForeignClass *config_foreign_class(const ConfigReader *r) {
    const cJSON *type = config_item(r, "model_type");
    for (int i = 0; i < FOREIGN_CLASS_COUNT; i++)
        if (cJSON_IsString(type) && strcmp(type->valuestring, foreign_classes[i].type) == 0) return &foreign_classes[i];
    return NULL;
}

// Appends a name to a list for a message.
static inline void config_list_add(char *list, size_t size, const char *name) {
    size_t length = strlen(list);
    snprintf(list + length, size - length, "%s%s", length ? ", " : "", name);
}

static inline const AttentionVariant *config_attention(const ConfigReader *r) {
    const cJSON *attention = config_item(r, "attention"), *type = config_item(r, "model_type");
    char known[1024] = "";
    if (!attention) {
        for (int i = 0; i < FOREIGN_CLASS_COUNT; i++) config_list_add(known, sizeof(known), foreign_classes[i].type);
        CHECK(type, "%s: the key model_type is missing; without the key attention it must be one of %s", r->path,
              known);
        CHECK(r->foreign, "%s: model_type is %s; without the key attention it must be one of %s", r->path,
              config_value_text(type).text, known);
        return variant_find("baseline");
    }
    const AttentionVariant *v = cJSON_IsString(attention) ? variant_find(attention->valuestring) : NULL;
    for (int i = 0; i < ATTENTION_VARIANT_COUNT; i++) config_list_add(known, sizeof(known), attention_variants[i].name);
    CHECK(v, "%s: attention is %s; supported are %s", r->path, config_value_text(attention).text, known);
    return v;
}

// Checks that an object describes no scaling of angles. Returns its rope_theta, or NAN.
static inline double config_unscaled_rope(const ConfigReader *r, const char *key) {
    const cJSON *rope = config_item(r, key);
    if (!rope) return NAN;
    CHECK(cJSON_IsObject(rope), "%s: %s is %s; it must be an object", r->path, key, config_value_text(rope).text);
    const cJSON *factor = cJSON_GetObjectItemCaseSensitive(rope, "factor");
    bool one = factor && factor->valuedouble == 1;
    for (const cJSON *e = rope->child; e; e = e->next) {
        if (strcmp(e->string, "rope_theta") == 0 || cJSON_IsNull(e)) continue;
        bool share = strcmp(e->string, "partial_rotary_factor") == 0 || strcmp(e->string, "factor") == 0;
        bool type = strcmp(e->string, "rope_type") == 0 || strcmp(e->string, "type") == 0;
        const char *name = type && cJSON_IsString(e) ? e->valuestring : "";
        bool unscaled = strcmp(name, "default") == 0 || (strcmp(name, "linear") == 0 && one);
        CHECK((share && e->valuedouble == 1) || unscaled,
              "%s: %s has %s = %s; supported are rope_type \"default\", and \"linear\" with factor 1", r->path, key,
              printable(e->string) ? e->string : "a key", config_value_text(e).text);
    }
    ConfigReader inner = *r;
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
    CHECK(!isnan(theta) || !r->foreign || !r->foreign->numbers,
          "%s: the key rope_theta is missing, and model_type is \"%s\", which requires it", r->path, r->foreign->type);
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

// Sets window and full_every from layer_types.
static inline void config_read_layer_types(const ConfigReader *r, const cJSON *types, ModelConfig *c) {
    bool *full = (bool *)checked_calloc(c->L, sizeof(bool));
    const cJSON *type = types->child;
    int upper = c->yoco ? c->L / 2 : c->L, first = upper; // first: the first layer that attends to all positions
    for (int l = 0; l < c->L; l++, type = type->next) {
        full[l] = config_layer_is_full(r, type);
        CHECK(c->window || full[l], "%s: layer_types has \"%s\", but there is no sliding_window%s", r->path,
              layer_type_names[0], r->foreign && r->foreign->window_switch ? " with use_sliding_window true" : "");
        if (full[l]) first = min_int(first, l);
    }
    if (first == 0) c->window = 0; // no layer that the window applies to
    if (c->window && first < upper) c->full_every = first + 1;
    for (int l = 0; l < c->L; l++)
        CHECK(full[l] == (layer_window(c, l) == 0),
              "%s: layer_types: layer %d does not fit the others; supported are windows in every layer, or in all but "
              "every K-th layer",
              r->path, l);
    free(full);
}

// Requires the key, for a class whose default differs. It may be null.
static inline void config_require(const ConfigReader *r, const char *key) {
    CHECK(cJSON_GetObjectItemCaseSensitive(r->object, key),
          "%s: the key %s is missing, and model_type is \"%s\", which requires it", r->path, key, r->foreign->type);
}

// Sets a window without layer_types: in the layers from max_window_layers on if the class has this key, else in all.
static inline void config_read_first_window(const ConfigReader *r, ModelConfig *c) {
    uint64_t first = 0;
    if (!r->foreign || !r->foreign->window_switch) return;
    const cJSON *item = config_item(r, "max_window_layers");
    CHECK(item, "%s: use_sliding_window is true: one of the keys layer_types and max_window_layers is required",
          r->path);
    CHECK(json_size(item, &first) && (first == 0 || first >= (uint64_t)c->L),
          "%s: max_window_layers is %s; supported are 0 (every layer has a window) and %d or more (none has)", r->path,
          config_value_text(item).text, c->L);
    if (first) c->window = 0;
}

// Reads sliding_window, layer_types and yoco. Rejects a key that the class of model_type ignores.
static inline void config_read_windows(const ConfigReader *r, ModelConfig *c) {
    const cJSON *types = config_item(r, "layer_types"), *window = config_item(r, "sliding_window");
    const ForeignClass *foreign = r->foreign;
    CHECK(!window || !foreign || foreign->windows, "%s: sliding_window is %s, but model_type is \"%s\", which has none",
          r->path, config_value_text(window).text, foreign->type);
    if (foreign && foreign->window_switch && !config_bool(r, "use_sliding_window", false)) window = NULL;
    else if (foreign && foreign->windows && !foreign->experts) config_require(r, "sliding_window"); // Mixtral: none
    c->window = window ? config_int(r, "sliding_window", 0) : 0;
    c->yoco = config_bool(r, "yoco", false);
    CHECK(!c->yoco || config_item(r, "attention"), "%s: yoco is true; a model with it has the key attention", r->path);
    CHECK(!types || (cJSON_IsArray(types) && cJSON_GetArraySize(types) == c->L),
          "%s: layer_types is %s; it must be an array with a name for each of the %d layers", r->path,
          config_value_text(types).text, c->L);
    CHECK(!types || !foreign || !foreign->windows || foreign->layer_types,
          "%s: layer_types is %s, but model_type is \"%s\", which ignores it", r->path, config_value_text(types).text,
          foreign->type);
    if (types) config_read_layer_types(r, types, c);
    else if (window) config_read_first_window(r, c);
}

// Reads use_qk_norm. The class decides whether the model has the norm; the key cannot change that.
static inline bool config_qk_norm(const ConfigReader *r) {
    bool expected = r->foreign && r->foreign->qk_norm, norm = config_bool(r, "use_qk_norm", expected);
    CHECK(!r->foreign || norm == expected, "%s: use_qk_norm is %s, but model_type is \"%s\", which %s this norm",
          r->path, norm ? "true" : "false", r->foreign->type, expected ? "always has" : "does not have");
    return norm;
}

// Reads the keys of experts. The class decides whether the model has experts; the keys cannot change that.
static inline void config_read_experts(const ConfigReader *r, ModelConfig *c) {
    static const char *const keys[] = {"num_local_experts", "num_experts_per_tok", "num_shared_experts",
                                       "num_dense_layers", "dense_intermediate_size"};
    const ForeignClass *f = config_item(r, "attention") ? NULL : r->foreign;
    bool experts = f && f->experts > 0;
    c->shared = config_count(r, keys[2]);
    c->dense_layers = config_count(r, keys[3]);
    for (int i = 0; i < 5; i++) {
        const cJSON *item = config_item(r, keys[i]);
        if ((i == 2 && c->shared == 0) || (i == 3 && c->dense_layers == 0))
            continue; // as Transformers writes our class
        CHECK(!item || !f || (experts && i < 2), "%s: %s is %s, but model_type is \"%s\", which does not have it",
              r->path, keys[i], config_value_text(item).text, f->type);
        CHECK(!item || experts || config_item(r, keys[0]), "%s: %s requires %s", r->path, keys[i], keys[0]);
    }
    c->router_bias = config_bool(r, "router_bias", false);
    CHECK(!c->router_bias || !f, "%s: router_bias is true, but model_type is \"%s\", which has no such bias", r->path,
          f->type);
    CHECK(!c->router_bias || config_item(r, keys[0]), "%s: router_bias requires %s", r->path, keys[0]);
    if (!experts && !config_item(r, keys[0])) return;
    c->E = config_int(r, keys[0], experts ? f->experts : 0);
    c->K = config_int(r, keys[1], experts ? f->active : 0);
    c->FE = c->F;
    if (c->dense_layers) c->F = config_int(r, keys[4], 0);
}

static inline void config_read_sparse(const ConfigReader *r, ModelConfig *c) {
    c->sparse_size = 64; // the option's default
    c->sparse_blocks = config_count(r, "sparse_blocks");
    if (!c->sparse_blocks) return;
    CHECK(!r->foreign || config_item(r, "attention"), "%s: sparse_blocks is %d; a model with it has the key attention",
          r->path, c->sparse_blocks);
    CHECK(c->sparse_blocks <= SPARSE_BLOCKS_LIMIT, "%s: sparse_blocks is %d; at most %d are supported", r->path,
          c->sparse_blocks, (int)SPARSE_BLOCKS_LIMIT);
    c->sparse_size = config_int(r, "sparse_block_size", 0);
    int every = config_count(r, "full_every");
    CHECK(!c->window || every == c->full_every, "%s: full_every is %d, but by layer_types it is %d", r->path, every,
          c->full_every);
    c->full_every = every;
}

static inline void config_read_parametrization(const ConfigReader *r, ModelConfig *c) {
    const cJSON *name = config_item(r, "parametrization");
    if (!name) return;
    while (c->parametrization < PARAMETRIZATION_COUNT &&
           !(cJSON_IsString(name) && strcmp(name->valuestring, parametrization_names[c->parametrization]) == 0))
        c->parametrization++;
    CHECK(c->parametrization < PARAMETRIZATION_COUNT,
          "%s: parametrization is %s; supported are \"standard\" and \"completep\"", r->path,
          config_value_text(name).text);
    c->base_width = config_count(r, "base_hidden_size");
    c->base_depth = config_count(r, "base_num_hidden_layers");
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
    char why[80] = "is not a JSON object";
    if (!object) json_why(text, size, why, sizeof(why));
    free(text);
    CHECK(cJSON_IsObject(object), "%s %s", path, why);
    ConfigReader reader, *r = &reader;
    r->path = path;
    r->object = object;
    r->foreign = config_foreign_class(r);
    if (r->foreign && r->foreign->kv_heads) config_require(r, "num_key_value_heads");

    ModelConfig c;
    memset(&c, 0, sizeof(c));
    c.attention = config_attention(r);
    config_refuse_features(r);
    c.V = config_int(r, "vocab_size", 0);
    c.C = config_int(r, "hidden_size", 0);
    c.L = config_int(r, "num_hidden_layers", 0);
    c.NH = config_int(r, "num_attention_heads", 0);
    c.NKV = config_int(r, "num_key_value_heads", c.NH);
    bool given_width = r->foreign && r->foreign->head_dim;
    c.D = config_int(r, "head_dim", c.C % c.NH == 0 && !given_width ? c.C / c.NH : 0);
    c.F = config_int(r, "intermediate_size", 0);
    config_read_experts(r, &c);
    c.T = config_int(r, "max_position_embeddings", 0);
    c.rope_theta = config_rope_theta(r);
    if (r->foreign && r->foreign->numbers) config_require(r, "rms_norm_eps");
    c.rms_norm_eps = config_number(r, "rms_norm_eps", 1e-6);
    c.tied = config_bool(r, "tie_word_embeddings", false);
    config_read_windows(r, &c);
    config_read_sparse(r, &c);
    c.qk_norm = config_qk_norm(r);
    config_read_parametrization(r, &c);
    cJSON_Delete(object);
    Problem problem;
    CHECK(model_config_problems(&c, &problem, 1) == 0, "%s: %s", path, problem);
    return c;
}
