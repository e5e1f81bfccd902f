// TVM's nodes as memory: what kind an object is and where its fields lie, both asked from TVM's own reflection.
//
// Only the C header of tvm_ffi is needed, so that compiling takes seconds. A type or field that TVM does not have
// where it is expected makes the reader unavailable; it is never guessed.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cdmpp {

using Object = TVMFFIObject;

/// Thrown where a program has something that is left to the Python walk.
struct Unsupported {};

enum Kind : uint8_t {
  kUnknown,
  // Expressions
  kVar, kTensorLoad, kCall, kIntImm, kFloatImm, kStringImm, kCast, kNot, kSelect, kRamp, kBroadcast, kLet,
  // Expressions with operands a and b
  kAdd, kSub, kMul, kDiv, kMod, kFloorDiv, kFloorMod, kMin, kMax, kEQ, kNE, kLT, kLE, kGT, kGE, kAnd, kOr,
  kLShift, kRShift, kBitwiseAnd, kBitwiseOr, kBitwiseXor,
  // Statements
  kFor, kWhile, kBufferStore, kAllocBuffer, kDeclBuffer, kAttrStmt, kSeqStmt, kIfThenElse, kEvaluate, kBind,
  kAssertStmt, kSBlock, kSBlockRealize,
  // Others
  kOp, kIterVar, kRange, kBufferType, kPrimType, kPrimFunc,
  kKinds,
};

/// Type keys by kind.
inline constexpr const char* kTypeKeys[kKinds] = {
    "",
    "ir.Var", "ir.TensorLoad", "ir.Call", "ir.IntImm", "ir.FloatImm", "ir.StringImm", "prim.Cast", "prim.Not",
    "prim.Select", "prim.Ramp", "prim.Broadcast", "prim.Let",
    "prim.Add", "prim.Sub", "prim.Mul", "prim.Div", "prim.Mod", "prim.FloorDiv", "prim.FloorMod", "prim.Min",
    "prim.Max", "prim.EQ", "prim.NE", "prim.LT", "prim.LE", "prim.GT", "prim.GE", "prim.And", "prim.Or",
    "prim.LShift", "prim.RShift", "prim.BitwiseAnd", "prim.BitwiseOr", "prim.BitwiseXor",
    "tirx.For", "tirx.While", "tirx.BufferStore", "tirx.AllocBuffer", "tirx.DeclBuffer", "tirx.AttrStmt",
    "tirx.SeqStmt", "tirx.IfThenElse", "tirx.Evaluate", "tirx.Bind", "tirx.AssertStmt", "s_tir.SBlock",
    "s_tir.SBlockRealize",
    "ir.Op", "tirx.IterVar", "ir.Range", "tirx.BufferType", "ir.PrimType", "tirx.PrimFunc",
};

inline bool is_binary(Kind kind) { return kind >= kAdd && kind <= kBitwiseXor; }
inline bool is_compare(Kind kind) { return kind >= kEQ && kind <= kGE; }
inline bool is_division(Kind kind) { return kind >= kDiv && kind <= kFloorMod; }

/// How a field is kept in its object.
enum Storage : uint8_t { kPointer, kInt32, kDType, kAny };

/// A field of one type; `at` is where its offset is put.
struct FieldSpec {
  Kind kind;
  const char* name;
  Storage storage;
  int64_t* at;
};

/// Offsets of fields in bytes; those of like name and meaning are told apart by their node.
struct Offsets {
  int64_t a, b, expr_ty;
  int64_t load_source, load_indices, call_op, call_args, int_value, cast_value, not_a, select_condition, select_true,
      select_false, ramp_base, ramp_stride, broadcast_value, let_var, let_value, let_body;
  int64_t for_var, for_extent, for_kind, for_body, for_thread, for_annotations, while_body, store_buffer, store_value,
      store_indices, alloc_buffer, attr_key, attr_value, attr_body, seq, if_condition, if_then, if_else,
      evaluate_value, bind_var, bind_value, block_iter_vars, block_allocated, block_init, block_body, realize_values,
      realize_predicate, realize_block;
  int64_t op_name, iter_dom, iter_var, iter_tag, range_extent, buffer_dtype, buffer_scope, buffer_shape, prim_dtype,
      func_body;
};

/// A field that refers to another object; nullptr where it is not set.
inline const Object* pointer(const Object* node, int64_t offset) {
  if (node == nullptr) throw Unsupported();
  return *reinterpret_cast<Object* const*>(reinterpret_cast<const char*>(node) + offset);
}

inline const TVMFFIAny& any(const Object* node, int64_t offset) {
  if (node == nullptr) throw Unsupported();
  return *reinterpret_cast<const TVMFFIAny*>(reinterpret_cast<const char*>(node) + offset);
}

inline std::string_view text(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFISmallStr) return {value.v_bytes, value.small_str_len};
  if (value.type_index != kTVMFFIStr) throw Unsupported();
  const auto* cell = reinterpret_cast<const TVMFFIByteArray*>(value.v_obj + 1);
  return {cell->data, cell->size};
}

inline bool starts_with(std::string_view text, std::string_view head) { return text.substr(0, head.size()) == head; }

/// The elements of an `ffi.Array` of objects.
class Items {
 public:
  explicit Items(const Object* array) {
    if (array == nullptr || array->type_index != kTVMFFIArray) throw Unsupported();
    const auto* cell = reinterpret_cast<const TVMFFISeqCell*>(array + 1);
    data_ = static_cast<const TVMFFIAny*>(cell->data);
    size_ = static_cast<size_t>(cell->size);
  }
  size_t size() const { return size_; }
  const Object* operator[](size_t i) const {
    if (data_[i].type_index < kTVMFFIStaticObjectBegin) throw Unsupported();
    return data_[i].v_obj;
  }

 private:
  const TVMFFIAny* data_;
  size_t size_;
};

/// Bytes of an element, and whether it is a floating-point number.
struct Element {
  double bytes;
  bool is_float;
};

/// TVM's types and fields as they are in this process.
class Nodes {
 public:
  Offsets at;

  /// Ask TVM; false and a message if something is not as expected.
  bool find(std::string* message) {
    std::vector<int32_t> index(kKinds, -1);
    for (int kind = kUnknown + 1; kind < kKinds; ++kind) {
      TVMFFIByteArray key{kTypeKeys[kind], std::strlen(kTypeKeys[kind])};
      if (TVMFFITypeKeyToIndex(&key, &index[kind]) != 0) {
        drop_error();
        *message = std::string("TVM has no type ") + kTypeKeys[kind];
        return false;
      }
      if (index[kind] >= static_cast<int32_t>(kind_of_.size())) kind_of_.resize(index[kind] + 1, kUnknown);
      kind_of_[index[kind]] = static_cast<Kind>(kind);
    }
    std::memset(&at, 0, sizeof(at));
    for (const FieldSpec& field : fields()) {
      if (!place(field, index[field.kind])) {
        *message = std::string("TVM's ") + kTypeKeys[field.kind] + " has no field " + field.name + " as expected";
        return false;
      }
    }
    for (auto [name, function] : {std::pair{"ffi.MapSize", &map_size_}, {"ffi.MapCount", &map_count_},
                                  {"ffi.MapGetItem", &map_item_}}) {
      TVMFFIByteArray key{name, std::strlen(name)};
      if (TVMFFIFunctionGetGlobal(&key, function) != 0 || *function == nullptr) {
        drop_error();
        *message = std::string("TVM has no function ") + name;
        return false;
      }
    }
    return true;
  }

  Kind kind(const Object* node) const {
    if (node == nullptr) return kUnknown;
    auto index = static_cast<size_t>(node->type_index);
    return index < kind_of_.size() ? kind_of_[index] : kUnknown;
  }

  const Object* a(const Object* node) const { return pointer(node, at.a); }
  const Object* b(const Object* node) const { return pointer(node, at.b); }

  int64_t int_value(const Object* imm) const {
    const TVMFFIAny& value = any(imm, at.int_value);
    if (value.type_index != kTVMFFIInt && value.type_index != kTVMFFIBool) throw Unsupported();
    return value.v_int64;
  }

  /// A value that must be an integer constant.
  int64_t constant(const Object* expr) const {
    if (kind(expr) != kIntImm) throw Unsupported();
    return int_value(expr);
  }

  int32_t for_kind(const Object* loop) const {
    return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(loop) + at.for_kind);
  }

  Element element(const Object* type) const {
    if (kind(type) != kPrimType) throw Unsupported();
    const auto* dtype = reinterpret_cast<const DLDataType*>(reinterpret_cast<const char*>(type) + at.prim_dtype);
    if (dtype->lanes > 0x7fff) throw Unsupported();  // of a length the program does not tell
    bool is_float = dtype->code != kDLInt && dtype->code != kDLUInt && dtype->code != kDLBool;
    return {static_cast<double>(dtype->bits * dtype->lanes) / 8, is_float};
  }

  /// The type of a buffer, which must be one with a shape.
  const Object* buffer_type(const Object* buffer) const {
    if (kind(buffer) != kVar) throw Unsupported();
    const Object* type = pointer(buffer, at.expr_ty);
    if (kind(type) != kBufferType) throw Unsupported();
    return type;
  }

  bool map_empty(const Object* map) const {
    if (map == nullptr) throw Unsupported();
    TVMFFIAny args[1] = {of(map)};
    return call(map_size_, args, 1).v_int64 == 0;
  }

  /// An integer in a map, or `otherwise`.
  int64_t map_int(const Object* map, const char* key, int64_t otherwise) const {
    TVMFFIAny name;
    name.type_index = kTVMFFIRawStr;
    name.zero_padding = 0;
    name.v_c_str = key;
    TVMFFIAny args[2] = {of(map), name};
    if (call(map_count_, args, 2).v_int64 == 0) return otherwise;
    TVMFFIAny value = call(map_item_, args, 2);
    if (value.type_index == kTVMFFIInt || value.type_index == kTVMFFIBool) return value.v_int64;
    if (value.type_index < kTVMFFIStaticObjectBegin) throw Unsupported();
    bool is_int = kind(value.v_obj) == kIntImm;
    int64_t number = is_int ? int_value(value.v_obj) : 0;
    TVMFFIObjectDecRef(value.v_obj);  // the map still holds it
    if (!is_int) throw Unsupported();
    return number;
  }

 private:
  std::vector<FieldSpec> fields() {
    std::vector<FieldSpec> all = {
        {kVar, "ty", kPointer, &at.expr_ty},
        {kTensorLoad, "source", kPointer, &at.load_source},
        {kTensorLoad, "indices", kPointer, &at.load_indices},
        {kCall, "op", kPointer, &at.call_op},
        {kCall, "args", kPointer, &at.call_args},
        {kIntImm, "value", kAny, &at.int_value},
        {kCast, "value", kPointer, &at.cast_value},
        {kNot, "a", kPointer, &at.not_a},
        {kSelect, "condition", kPointer, &at.select_condition},
        {kSelect, "true_value", kPointer, &at.select_true},
        {kSelect, "false_value", kPointer, &at.select_false},
        {kRamp, "base", kPointer, &at.ramp_base},
        {kRamp, "stride", kPointer, &at.ramp_stride},
        {kBroadcast, "value", kPointer, &at.broadcast_value},
        {kLet, "var", kPointer, &at.let_var},
        {kLet, "value", kPointer, &at.let_value},
        {kLet, "body", kPointer, &at.let_body},
        {kFor, "loop_var", kPointer, &at.for_var},
        {kFor, "extent", kPointer, &at.for_extent},
        {kFor, "kind", kInt32, &at.for_kind},
        {kFor, "body", kPointer, &at.for_body},
        {kFor, "thread_binding", kPointer, &at.for_thread},
        {kFor, "annotations", kPointer, &at.for_annotations},
        {kWhile, "body", kPointer, &at.while_body},
        {kBufferStore, "buffer", kPointer, &at.store_buffer},
        {kBufferStore, "value", kPointer, &at.store_value},
        {kBufferStore, "indices", kPointer, &at.store_indices},
        {kAllocBuffer, "buffer", kPointer, &at.alloc_buffer},
        {kAttrStmt, "attr_key", kAny, &at.attr_key},
        {kAttrStmt, "value", kPointer, &at.attr_value},
        {kAttrStmt, "body", kPointer, &at.attr_body},
        {kSeqStmt, "seq", kPointer, &at.seq},
        {kIfThenElse, "condition", kPointer, &at.if_condition},
        {kIfThenElse, "then_case", kPointer, &at.if_then},
        {kIfThenElse, "else_case", kPointer, &at.if_else},
        {kEvaluate, "value", kPointer, &at.evaluate_value},
        {kBind, "var", kPointer, &at.bind_var},
        {kBind, "value", kPointer, &at.bind_value},
        {kSBlock, "iter_vars", kPointer, &at.block_iter_vars},
        {kSBlock, "alloc_buffers", kPointer, &at.block_allocated},
        {kSBlock, "init", kPointer, &at.block_init},
        {kSBlock, "body", kPointer, &at.block_body},
        {kSBlockRealize, "iter_values", kPointer, &at.realize_values},
        {kSBlockRealize, "predicate", kPointer, &at.realize_predicate},
        {kSBlockRealize, "block", kPointer, &at.realize_block},
        {kOp, "name", kAny, &at.op_name},
        {kIterVar, "dom", kPointer, &at.iter_dom},
        {kIterVar, "var", kPointer, &at.iter_var},
        {kIterVar, "thread_tag", kAny, &at.iter_tag},
        {kRange, "extent", kPointer, &at.range_extent},
        {kBufferType, "dtype", kPointer, &at.buffer_dtype},
        {kBufferType, "storage_scope", kAny, &at.buffer_scope},
        {kBufferType, "shape", kPointer, &at.buffer_shape},
        {kPrimType, "dtype", kDType, &at.prim_dtype},
        {kPrimFunc, "body", kPointer, &at.func_body},
    };
    for (int kind = kAdd; kind <= kBitwiseXor; ++kind) {
      all.push_back({static_cast<Kind>(kind), "a", kPointer, &at.a});
      all.push_back({static_cast<Kind>(kind), "b", kPointer, &at.b});
      all.push_back({static_cast<Kind>(kind), "ty", kPointer, &at.expr_ty});
    }
    return all;
  }

  /// Put the offset of a field into its place; false if it is not there or kept otherwise.
  static bool place(const FieldSpec& field, int32_t type_index) {
    const TVMFFITypeInfo* own = TVMFFIGetTypeInfo(type_index);
    if (own == nullptr) return false;
    for (int32_t depth = own->type_depth; depth >= 0; --depth) {
      const TVMFFITypeInfo* type = depth == own->type_depth ? own : own->type_ancestors[depth];
      for (int32_t i = 0; i < type->num_fields; ++i) {
        const TVMFFIFieldInfo& found = type->fields[i];
        if (std::string_view(found.name.data, found.name.size) != field.name) continue;
        int32_t held = found.field_static_type_index;
        bool expected = field.storage == kPointer ? found.size == 8 && (held < 0 || held >= kTVMFFIStaticObjectBegin)
                        : field.storage == kInt32 ? found.size == 4 && held == kTVMFFIInt
                        : field.storage == kDType ? found.size == 4 && held == kTVMFFIDataType
                                                  : found.size == sizeof(TVMFFIAny);
        if (!expected || (*field.at != 0 && *field.at != found.offset)) return false;
        *field.at = found.offset;
        return true;
      }
    }
    return false;
  }

  static TVMFFIAny of(const Object* object) {
    TVMFFIAny value;
    value.type_index = object->type_index;
    value.zero_padding = 0;
    value.v_obj = const_cast<Object*>(object);
    return value;
  }

  static TVMFFIAny call(TVMFFIObjectHandle function, TVMFFIAny* args, int32_t n) {
    TVMFFIAny result;
    result.type_index = kTVMFFINone;
    result.zero_padding = 0;
    result.v_int64 = 0;
    if (TVMFFIFunctionCall(function, args, n, &result) != 0) {
      drop_error();
      throw Unsupported();
    }
    return result;
  }

  static void drop_error() {
    TVMFFIObjectHandle error = nullptr;
    TVMFFIErrorMoveFromRaised(&error);
    if (error != nullptr) TVMFFIObjectDecRef(error);
  }

  std::vector<Kind> kind_of_;
  TVMFFIObjectHandle map_size_ = nullptr, map_count_ = nullptr, map_item_ = nullptr;
};

/// Set once, before any program is read.
inline Nodes& nodes() {
  static Nodes the_nodes;
  return the_nodes;
}

}  // namespace cdmpp
