//! Mistakes and what the compiler says about each; the toolchain is pinned because its words are compared.

#[test]
fn mistakes_are_reported_at_their_tokens() {
    let tests = trybuild::TestCases::new();
    for kind in ["attribute", "shape", "generics", "unsupported"] {
        tests.compile_fail(format!("tests/ui/{kind}/*.rs"));
    }
}
